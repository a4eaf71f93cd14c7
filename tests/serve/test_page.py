"""The page at ``/`` in a real browser: a user asks a question and sees the chain of agents."""

from __future__ import annotations

import json
import time
import urllib.parse

from tests import tiny_policy
from tests.serve.browser import Browser, needs_browser
from tests.serve.live import meter, server
from tests.tiny_policy import TASKS

TITLES = "[...document.querySelectorAll('.part h2')].map((h) => h.firstChild.textContent)"
STATE = "document.getElementById('state')?.textContent"


def ask(browser, question):
    browser.run(
        f"document.getElementById('question').value = {json.dumps(question)};"
        "document.getElementById('form').requestSubmit()"
    )


@needs_browser
def test_a_question_is_answered_part_by_part(tmp_path):
    task = TASKS[0]
    with server() as address, Browser(tmp_path) as browser:
        browser.call("Page.navigate", url=address)
        browser.until("document.getElementById('model')?.textContent === 'tiny'")
        ask(browser, task.question)
        browser.until(f"{STATE}?.startsWith('Done: ')")
        titles = browser.run(TITLES)
        assert titles[-1] == "Answer"
        assert titles.count("Observation of wiki_search") == 1
        where = titles.index("Observation of wiki_search")
        assert titles[where - 1] == "Tool: wiki_search"
        assert browser.run("document.querySelector('.part.answer pre').textContent") == task.gold[0]
        seen = browser.run("document.querySelector('.part.observation pre').textContent")
        assert tiny_policy.PASSAGES[0].text in seen
        assert "<" not in browser.run("document.getElementById('chain').innerText")
        assert browser.run("document.body.scrollWidth <= document.documentElement.clientWidth")
        # What a page shows of a text is text, whatever it says.
        ask(browser, "<img src=x onerror='document.title=1'>")
        browser.until(f"/^(Done|No answer)/.test({STATE})")
        assert browser.run("document.title") == "Chain of agents"


@needs_browser
def test_a_question_in_a_link_is_asked_by_a_click_and_not_before(tmp_path):
    asked = 'coa_jax_requests_total{route="/v1/chat/completions",status="200"}'
    with server() as address, Browser(tmp_path) as browser:
        question = urllib.parse.quote(TASKS[2].question)
        browser.call("Page.navigate", url=f"{address}/?q={question}")
        browser.until("document.getElementById('model')?.textContent === 'tiny'")
        assert browser.run("document.getElementById('question').value") == TASKS[2].question
        time.sleep(0.5)  # in which it would be asked
        assert browser.run(STATE) == "" and meter(address, asked) == 0
        browser.run("document.getElementById('send').click()")
        browser.until(f"{STATE}?.startsWith('Done: ')")
        assert browser.run("document.querySelector('.part.answer pre').textContent") == "84"


@needs_browser
def test_another_page_cannot_frame_it(tmp_path):
    """A frame that was refused holds an error of the browser, of an origin that nobody may read."""
    frame = "document.querySelector('iframe')"
    with server() as address, Browser(tmp_path) as browser:
        browser.call("Page.navigate", url=f"{address}/health")
        browser.until("document.body?.innerText.includes('ok')")
        browser.run(
            'document.body.innerHTML = \'<iframe src="/" onload="this.name = 1"></iframe>\''
        )
        browser.until(f"{frame}.name === '1'")
        assert browser.run(f"{frame}.contentDocument === null")


@needs_browser
def test_a_mistake_is_shown_and_a_key_is_asked_for(tmp_path):
    with server(api_key="sesame") as address, Browser(tmp_path) as browser:
        browser.call("Page.navigate", url=f"{address}/?q=river")
        browser.until(f"{STATE} === 'This server asks for an API key.'")
        browser.run("document.getElementById('key').value = 'sesame'")
        ask(browser, "river " * 500)
        assert "tokens" in browser.until(f"{STATE}?.includes('room') && {STATE}")
        ask(browser, TASKS[2].question)
        browser.until(f"{STATE}?.startsWith('Done: ')")
        assert browser.run("document.querySelector('.part.answer pre').textContent") == "84"
