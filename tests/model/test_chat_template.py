"""Chat templates are programs of others: rendered as transformers does, within bounds."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from coa_jax.errors import UserError
from coa_jax.model import chat_template
from coa_jax.model.chat_template import ChatTemplateError, render
from tests.chats import chat_ids
from tests.tiny_tokenizer import train_tokenizer

TURNS = [{"role": "user", "content": "Who?"}]
LIKE_QWEN = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}\n"
    "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}\n"
    "{%- for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}\n"
    "    {% generation %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endgeneration %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{# {{ strftime_now('%Y') }} #}{{ bos_token }}"
)


def test_templates_are_rendered_as_transformers_renders_them():
    tokenizer = train_tokenizer(["one"], 300)
    tokenizer.chat_template = LIKE_QWEN
    names = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    ours = render(LIKE_QWEN, TURNS, add_generation_prompt=True, **names)
    assert ours == tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert "Be kind." in ours
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert chat_ids(tokenizer, "Who?") == ids


def test_jinja_is_imported_from_where_this_process_would(monkeypatch, tmp_path):
    (tmp_path / "jinja2.py").write_text("raise ImportError('the one of the user')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ChatTemplateError, match="the one of the user"):
        render(LIKE_QWEN, TURNS)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}" * 6 + "{% endfor %}" * 6, "more than 1 seconds"),
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        (
            "{% set ns = namespace(x='a') %}" + "{% set ns.x = ns.x ~ ns.x %}" * 99,
            "MemoryError|MiB",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "writes more than 1,048,576"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('not\nso') }}", "TemplateError: not so"),
        ("{{ nothing.at_all }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_refused(template, why, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 1)
    start = time.process_time()
    with pytest.raises(ChatTemplateError, match=why) as caught:
        render(template, TURNS)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 5  # whatever it takes, its own process takes it


@pytest.fixture
def escape(monkeypatch):
    """Runs Python code where a template runs, as after an escape from Jinja's sandbox."""

    def run(code):
        source = Path(chat_template.__file__).read_text()
        start = "    try:\n        template = environment.from_string"
        assert start in source
        changed = source.replace(start, f"    {code}\n{start}").replace(
            "Path(__file__)", f"Path({chat_template.__file__!r})"
        )
        call, text = subprocess.run, changed
        monkeypatch.setattr(
            chat_template.subprocess,
            "run",
            lambda command, **options: call([*command[:2], "-c", text], **options),
        )
        return render("x", TURNS)

    return run


def test_a_template_that_left_jinjas_sandbox_reaches_nothing(escape, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_API_KEY", "key-0123456789")
    assert "key-" not in escape("return {'text': str(dict(os.environ))}")
    (tmp_path / "secret").write_text("x")
    attacks = {
        "read": f"open({str(tmp_path / 'secret')!r})",
        "root": "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
        "remove": f"os.unlink({str(tmp_path / 'secret')!r})",
        "connect": "__import__('_socket').socket()",
        "start": "os.fork()",
        "kill": f"os.kill({os.getpid()}, 0)",
    }
    for name, code in attacks.items():
        said = escape(
            f"try: {code}; return {{'text': 'done'}}\n"
            "    except (OSError, ValueError, ImportError) as e: return {'text': type(e).__name__}"
        )
        assert said != "done", name
    assert (tmp_path / "secret").exists()


def test_the_tokenizer_says_whose_template_it_is():
    tokenizer = train_tokenizer(["one"], 300)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match=r"TemplateError: no$"):
        chat_ids(tokenizer, "Who?")
