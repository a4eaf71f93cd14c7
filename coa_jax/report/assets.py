"""Holds the style sheet and the scripts of report pages, which load no other file."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1d2126; --dim: #5a6473;
  --rule: #e2e4e8; --soft: #f1f2f4; --accent: #2f5fd0; --good: #14713f; --bad: #b8322a;
  --s0: #2f5fd0; --s1: #d9730d; --s2: #1a7f4b; --s3: #a3359c; --s4: #0e8a9e; --s5: #b8322a;
  --s6: #7a6a1c; --s7: #667080;
  --think: #5a6473; --plan: #7048c8; --tool: #0b76b7; --code: #0a7a62; --reflection: #a05f00;
  --suggest: #a3359c; --check: #b93c0a; --answer: #14713f; --env-bg: #f3efe4; --env: #75663a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1b1f25; --ink: #e6e8eb;
  --dim: #97a1af; --rule: #2d333c; --soft: #232830; --accent: #8ab0ff; --good: #58c98e;
  --bad: #ff8a80; --s0: #8ab0ff; --s1: #f5a65b; --s2: #58c98e; --s3: #e08be0; --s4: #5fd0e0;
  --s5: #ff8a80; --s6: #d8c66a; --s7: #97a1af; --think: #97a1af; --plan: #b79cff;
  --tool: #6cc0f5; --code: #5fd6bb; --reflection: #f0b860; --suggest: #e08be0; --check: #ff9d6b;
  --answer: #58c98e; --env-bg: #26241c; --env: #cdbb85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 64px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 10px; }
h3 { font-size: 14px; margin: 18px 0 8px; color: var(--dim); font-weight: 600; }
p { margin: 6px 0; } .dim { color: var(--dim); }
pre, code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav { margin-top: 8px; } nav a { margin-right: 16px; color: var(--accent); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 14px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { font-weight: 600; color: var(--dim); font-size: 13px; white-space: normal;
  vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } tbody tr:last-child td { border-bottom: 0; }
.detail td, .detail th { padding: 4px 14px; } .detail { font-size: 14px; }
td strong { font-size: 17px; } 
.interval { width: 150px; height: 22px; display: block; margin-left: auto; }
.warnings { border-left: 3px solid var(--check); margin: 0; padding: 0 0 0 30px; }
.interval .bar { stroke: var(--accent); stroke-width: 4; stroke-linecap: round; opacity: .45; }
.interval .dot { fill: var(--accent); }
.facts { display: flex; flex-wrap: wrap; gap: 4px 26px; padding: 0; margin: 8px 0; }
.facts div { display: flex; gap: 8px; } .facts dt { color: var(--dim); } .facts dd { margin: 0; }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); }
.chart { margin: 0; padding: 10px 12px 8px; background: var(--card); position: relative;
  border: 1px solid var(--rule); border-radius: 10px; }
.chart figcaption { font-weight: 600; font-size: 14px; }
.chart svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--rule); } .axis { stroke: var(--dim); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .faint { opacity: .3; }
.dashed { stroke-dasharray: 5 3; } i.dashed { opacity: .55; }
circle.line { stroke: none; }
.cursor { stroke: var(--dim); stroke-dasharray: 3 3; visibility: hidden; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } .s4 { stroke: var(--s4); } .s5 { stroke: var(--s5); }
.s6 { stroke: var(--s6); } .s7 { stroke: var(--s7); }
circle.s0 { fill: var(--s0); } circle.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); }
circle.s3 { fill: var(--s3); } circle.s4 { fill: var(--s4); } circle.s5 { fill: var(--s5); }
circle.s6 { fill: var(--s6); } circle.s7 { fill: var(--s7); }
i.s0 { background: var(--s0); } i.s1 { background: var(--s1); } i.s2 { background: var(--s2); }
i.s3 { background: var(--s3); } i.s4 { background: var(--s4); } i.s5 { background: var(--s5); }
i.s6 { background: var(--s6); } i.s7 { background: var(--s7); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; color: var(--dim); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 5px; }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--bg);
  padding: 4px 8px; border-radius: 6px; font-size: 12px; white-space: pre; z-index: 2; }
details > summary { cursor: pointer; }
details.more { margin-top: 14px; } details.more > summary { color: var(--accent); }
.config { padding: 12px 16px; margin: 8px 0 0; overflow-x: auto; }
.filters { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap; gap: 8px;
  align-items: center; padding: 10px 0; background: var(--bg); }
.filters select, .filters input, button { font: inherit; font-size: 14px; color: inherit;
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 5px 9px; }
.filters input { flex: 1 1 180px; min-width: 0; } button { cursor: pointer; }
.filters output { color: var(--dim); font-size: 13px; }
.trace { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  margin-bottom: 8px; } .trace[hidden] { display: none; }
.trace > summary { display: flex; gap: 10px; padding: 9px 14px; list-style: none;
  align-items: baseline; } .trace > summary::-webkit-details-marker { display: none; }
.trace[open] > summary { border-bottom: 1px solid var(--rule); }
.mark { font-weight: 700; width: 1.1em; flex: none; text-align: center; color: var(--dim); }
.mark.correct { color: var(--good); } .mark.wrong { color: var(--bad); }
.question { flex: 1 1 auto; min-width: 0; overflow-wrap: anywhere; unicode-bidi: isolate; }
.chips { flex: none; display: flex; gap: 6px; flex-wrap: wrap; font-size: 12px;
  color: var(--dim); } .chips b, .chips span { background: var(--soft); border-radius: 6px;
  padding: 1px 7px; white-space: nowrap; } .chips b { color: var(--ink); font-weight: 600; }
.trace .body { padding: 12px 14px; }
.outcome { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 0 0 10px; }
.outcome dt { font-size: 12px; color: var(--dim); } .outcome dd { margin: 0; font-weight: 600;
  overflow-wrap: anywhere; unicode-bidi: isolate; }
.rules { border-left: 3px solid var(--bad); padding: 2px 12px; margin: 0 0 10px;
  font-size: 13px; } .rules ul { margin: 2px 0; padding-left: 18px; }
.same { font-size: 12px; padding: 2px 8px; float: right; }
.pair { display: grid; gap: 4px 20px; padding: 12px 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }
.pair > * { min-width: 0; } .pair h4 { margin: 0 0 8px; }
.settings td, .settings th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.segment { --role: var(--dim); border-left: 4px solid var(--role); margin: 0 0 8px;
  padding: 3px 0 3px 12px; border-radius: 3px; }
.segment header { display: flex; flex-wrap: wrap; gap: 8px; font-size: 12px; font-weight: 700;
  color: var(--role); align-items: baseline; }
.segment header em { font-style: normal; font-weight: 500; color: var(--dim);
  background: var(--soft); border-radius: 6px; padding: 0 6px; }
.segment header em.ok { color: var(--good); } .segment header em.bad { color: var(--bad); }
.segment pre { margin: 2px 0 0; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; font-family: inherit; font-size: 14px; }
.r-think { --role: var(--think); } .r-think pre { color: var(--dim); }
.r-plan { --role: var(--plan); } .r-reflection { --role: var(--reflection); }
.r-wiki_search, .r-web_search, .r-crawl_page, .r-visual_inspector { --role: var(--tool); }
.r-code { --role: var(--code); } .r-suggested_answer { --role: var(--suggest); }
.r-double_check { --role: var(--check); } .r-answer { --role: var(--answer); }
.r-answer pre { font-weight: 600; } .r-other { --role: var(--bad); }
.r-observation { --role: var(--env); }
.segment.env { background: var(--env-bg); border-left-style: double; margin-left: 28px;
  padding: 6px 12px; } .segment.env pre { max-height: 22em; overflow: auto; }
.segment.r-code pre, .segment.env pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
.tokens pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  max-height: 40em; overflow: auto; }
.tokens span { border-radius: 3px; box-shadow: inset -1px 0 var(--rule); }
.tokens .at { outline: 2px solid var(--ink); }
.tokens .prompt { color: var(--dim); } .tokens .tool { background: var(--env-bg); }
.p0, .p1, .p2, .p3, .p4 { background: color-mix(in srgb, var(--accent) var(--p), transparent); }
.p0 { --p: 8%; } .p1 { --p: 18%; } .p2 { --p: 30%; } .p3 { --p: 38%; } .p4 { --p: 46%; }
@media (max-width: 640px) { body { padding: 16px 12px 48px; }
  .charts { grid-template-columns: 1fr; } th, td, .detail td, .detail th { padding: 6px 8px; }
  th { white-space: nowrap; } td:first-child, .detail td { white-space: normal; }
  td:first-child { min-width: 8em; }
 .trace > summary { flex-wrap: wrap; }
  .question { flex-basis: 80%; }
  .chips { padding-left: 1.9em; } .segment.env { margin-left: 8px; }
  .filters { position: static; } }
@media print { .filters, .same { display: none; } }
"""

_TRACES = """
'use strict';
const traces = [...document.querySelectorAll('.trace')];
const control = name => document.getElementById('filter-' + name);
const names = ['stage', 'verdict', 'hops'];
let task = null;

function applyFilters() {
  const wanted = names.map(name => control(name).value);
  const words = control('text').value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const trace of traces) {
    const text = words.length ? trace.textContent.toLowerCase() : '';
    const keep = names.every((name, i) => !wanted[i] || trace.dataset[name] === wanted[i])
      && (task === null || trace.dataset.task === task) && words.every(w => text.includes(w));
    trace.hidden = !keep;
    shown += keep;
  }
  control('count').value = `${shown} of ${traces.length} traces`;
  control('reset').hidden = shown === traces.length;
}

// The filters are kept in the address, so that they can be linked: #stage=rl&verdict=wrong
function filtersToAddress() {
  const chosen = new URLSearchParams(task === null ? {} : {task});
  for (const name of [...names, 'text'])
    if (control(name).value) chosen.set(name, control(name).value);
  history.replaceState(null, '', '#' + (String(chosen) || 'traces'));
  applyFilters();
}

function filtersFromAddress() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  task = chosen.get('task');
  for (const name of [...names, 'text']) control(name).value = chosen.get(name) || '';
  applyFilters();
  if (location.hash.includes('=')) document.getElementById('traces').scrollIntoView();
}

function resetFilters() {
  task = null;
  for (const name of [...names, 'text']) control(name).value = '';
  filtersToAddress();
}

if (traces.length) {
  for (const name of names) control(name).addEventListener('change', filtersToAddress);
  control('text').addEventListener('input', filtersToAddress);
  control('reset').addEventListener('click', resetFilters);
  for (const trace of traces) {
    trace.querySelector('.same').addEventListener('click', () => {
      resetFilters();
      task = trace.dataset.task;
      filtersToAddress();
      trace.scrollIntoView({block: 'center'});
    });
  }
  addEventListener('hashchange', () => location.hash.includes('=') && filtersFromAddress());
  filtersFromAddress();
}

for (const list of document.querySelectorAll('.tokens pre')) {
  const told = list.parentNode.querySelector('output');
  let at = null;
  const choose = token => {
    if (!token || !token.title) return;
    if (at) at.classList.remove('at');
    at = token;
    at.classList.add('at');
    at.scrollIntoView({block: 'nearest'});
    told.value = `"${at.textContent}": ${at.title}`;
  };
  list.addEventListener('click', event => choose(event.target));
  list.addEventListener('keydown', event => {
    const steps = {ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling'};
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(at ? at[steps[event.key]] : list.firstElementChild);
  });
}

"""

CHARTS = """
'use strict';
const short = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString('en')
  : String(Number(value.toPrecision(4)));

function hover(svg) {
  const data = JSON.parse(svg.dataset.chart);
  const [left, top, width, height] = data.plot;
  const cursor = svg.querySelector('.cursor');
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  svg.parentNode.append(tip);
  const steps = [...new Set(data.series.flatMap(s => s.x))].sort((a, b) => a - b);
  const hide = () => { tip.hidden = true; cursor.style.visibility = 'hidden'; };
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const share = ((event.clientX - box.left) * scale - left) / width;
    const at = data.x[0] + share * (data.x[1] - data.x[0]);
    const step = steps.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    const x = left + (step - data.x[0]) / (data.x[1] - data.x[0]) * width;
    const lines = data.series.map(s => [s.name, s.y[s.x.indexOf(step)]])
      .filter(([, y]) => y !== undefined && y !== null).map(([name, y]) => `${name}: ${short(y)}`);
    tip.textContent = [`step ${short(step)}`, ...lines].join('\\n');
    for (const [name, value] of Object.entries({x1: x, x2: x, y1: top, y2: top + height}))
      cursor.setAttribute(name, value);
    cursor.style.visibility = 'visible';
    tip.hidden = false;
    const room = svg.parentNode.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(4, Math.min(room, x / scale + 18)) + 'px';
    const above = box.top - svg.parentNode.getBoundingClientRect().top;
    tip.style.top = (above + top / scale + 4) + 'px';
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', hide);
}
document.querySelectorAll('svg[data-chart]').forEach(hover);
"""
"""Script of a page that has charts but no trajectories."""

SCRIPT = _TRACES + CHARTS
"""Script of a page that has trajectories and charts."""
