"""Pages in a real browser, checked by axe-core: what screen readers and keyboards need is there.

`npm install --no-save --prefix build axe-core` puts axe where these tests find it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.cli.compare import run
from coa_jax.report import build_report
from coa_jax.report.evaluation_page import write_page
from coa_jax.report.page import whole_page
from coa_jax.report.sweep import build_sweep
from tests.evaluation.made import outcome
from tests.report.run_files import write_run
from tests.serve.browser import Browser, needs_browser
from tests.serve.live import server
from tests.tiny_policy import TASKS

REPOSITORY = Path(__file__).resolve().parent.parent
AXE = REPOSITORY / "build" / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = [
    needs_browser,
    pytest.mark.skipif(not AXE.exists(), reason="npm install --no-save --prefix build axe-core"),
]


def violations(browser: Browser) -> list[str]:
    """Rules that the current page breaks, on a phone and a screen, in light and dark colours."""
    found = []
    browser.run("for (const closed of document.querySelectorAll('details')) closed.open = true")
    for scheme in ("light", "dark"):
        scheme_is = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=scheme_is)
        for width in (390, 1400):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.run(
                "window.told = null; axe.run({resultTypes: ['violations']}).then(all => {"
                "window.told = JSON.stringify(all.violations.map(one =>"
                "`${one.id}: ${one.nodes.slice(0, 3).map(node => node.html.slice(0, 120))}`))})"
            )
            told = json.loads(browser.until("window.told", 120))
            found += [f"{scheme} {width}: {one}" for one in told]
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), width
    return found


def opened(browser: Browser, address: str) -> None:
    """Opens a page, with axe in it."""
    browser.call("Page.setBypassCSP", enabled=True)
    browser.call("Page.navigate", url=address)
    there = f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'"
    browser.until(there, 120)
    browser.run(AXE.read_text())


def pages(root: Path) -> list[Path]:
    """A report, an empty report, a comparison, an evaluation and a sweep."""
    first, second = write_run(root / "sweep" / "one-0"), write_run(root / "sweep" / "one-1")
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_text("{}")
    rows = {f"factbook/half-area/{k}": [float(k % 2)] for k in range(8)}
    for folder, change in ((first, {}), (second, {"factbook/half-area/2": [1.0]})):
        path = folder / "evaluate" / "rl" / "results.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(outcome({**rows, **change}, "rl")))
    run([str(first), str(second)])
    return [
        build_report(first),
        build_report(root / "empty"),
        second / "report" / "compare.html",
        write_page(outcome(rows, "rl"), root / "benchmark.html"),
        build_sweep(root / "sweep")[0],
    ]


def test_the_pages_of_runs_break_no_rule(tmp_path):
    with Browser(tmp_path / "profile") as browser:
        for path in pages(tmp_path):
            opened(browser, path.as_uri())
            assert violations(browser) == [], path


def test_tokens_can_be_inspected_with_the_arrow_keys(tmp_path):
    page = tmp_path / "page.html"
    tokens = "".join(f'<span title="policy, id {i}">{i}</span>' for i in range(3))
    body = f'<details open class="tokens"><output></output><pre tabindex="0">{tokens}</pre>'
    page.write_text(whole_page("t", [f"{body}</details>"]))
    with Browser(tmp_path / "profile") as browser:
        opened(browser, page.as_uri())
        browser.run("document.querySelector('.tokens pre').focus()")
        for key, told in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0)):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
            browser.until(
                f"document.querySelector('output').value === '\"{told}\": policy, id {told}'"
            )


def test_the_served_page_breaks_no_rule_before_and_after_an_answer(tmp_path):
    with server() as address, Browser(tmp_path) as browser:
        opened(browser, address)
        browser.until("document.getElementById('model')?.textContent === 'tiny'")
        assert violations(browser) == []
        question = json.dumps(TASKS[0].question)
        browser.run(
            f"document.getElementById('question').value = {question};"
            "document.getElementById('form').requestSubmit()"
        )
        browser.until("document.getElementById('state').textContent.startsWith('Done: ')")
        assert violations(browser) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_breaks_no_rule(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, str(REPOSITORY / "docs/site/build.py"), f"--out={tmp_path / 'site'}"]
    subprocess.run(build, check=True)
    names = ["index", "tutorials/first_run", "runs", "api", "commands/rl", "api/tools"]
    names += [f"notebooks/{path.stem}" for path in (REPOSITORY / "notebooks").glob("*.ipynb")]
    with Browser(tmp_path / "profile") as browser:
        for name in names:
            opened(browser, (tmp_path / "site" / f"{name}.html").as_uri())
            assert violations(browser) == [], name
