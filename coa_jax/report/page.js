'use strict';
const traces = [...document.querySelectorAll('.trace')];
const control = name => document.getElementById('filter-' + name);
const names = ['stage', 'verdict', 'hops'];
let task = null;

function applyFilters() {
  const wanted = names.map(name => control(name).value);
  const words = control('text').value.toLowerCase().split(/\s+/).filter(Boolean);
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

if (control('count')) {
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
    tip.textContent = [`step ${short(step)}`, ...lines].join('\n');
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
