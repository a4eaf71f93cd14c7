"""Inspecting images: files in allowed folders and public addresses only."""

from __future__ import annotations

import asyncio
import base64
import json
import os

import pytest

from coa_jax.errors import UserError
from coa_jax.tools import visual_inspector
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.visual_inspector import VisualConfig, VisualInspector, image_type
from tests.tools import fault_server

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
KEY = "vision-key-0123456789"


@pytest.fixture(scope="module")
def server(server):
    def look(handler):
        text, image = json.loads(handler.body)["messages"][0]["content"]
        kind, data = image["image_url"]["url"].split(";base64,")
        size = len(base64.b64decode(data))
        reply = f"{kind} {size} {handler.headers['authorization']}: {text['text']}"
        handler.json({"choices": [{"message": {"content": reply}}]})

    server.pages["/v1/chat/completions"] = look
    for name in ("/500", "/hang", "/malformed"):
        server.pages[f"{name}/chat/completions"] = server.pages[name]
    server.pages["/picture"] = lambda h: h.answer(PNG, content_type="image/png")
    server.pages["/liar"] = lambda h: h.answer(b"<html>", content_type="image/png")
    return server


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "pictures" / "deep" / "b.png").write_bytes(PNG)
    (tmp_path / "pictures" / "note.png").write_text("no image")
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "pictures" / "out").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pictures" / "pipe.png")
    return tmp_path / "pictures"


def tool(server, folder=None, path="/v1", **options):
    chat = ChatConfig(server.url(path), "eyes", key_env="VISION_KEY", timeout_s=2.0, attempts=1)
    return VisualInspector(VisualConfig(chat, str(folder or ""), **options))


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VISION_KEY", KEY)


def ask(tool, path, question=None, deadline=None):
    body = path if path.startswith("{") else json.dumps({"file_path": path, "question": question})
    return asyncio.run(call_tool(tool, body, ToolContext(deadline=deadline)))


def test_an_image_is_described_with_the_question_in_view(server, folder):
    inspector = tool(server, folder)
    seen = ask(inspector, "a.png", "Which colour?")
    assert isinstance(inspector, Tool) and seen.ok
    assert seen.text.startswith(f"data:image/png {len(PNG)} Bearer [secret]: Describe what")
    assert seen.text.endswith("The question: Which colour?")
    assert KEY not in f"{seen}"
    assert ask(inspector, str(folder / "deep" / "b.png")).ok
    assert ask(inspector, "deep/../a.png").ok


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "deep/../../secret.png",
        "link.png",
        "out/secret.png",
        "/etc/passwd",
        "/proc/self/environ",
        "pipe.png",
        "deep",
        ".",
        "~/secret.png",
        "file:///etc/passwd",
        "\ud800.png",
        "a.png\0.jpg",
        "absent.png",
        "x" * 5000,
        "{folder}/../secret.png",
        "{folder}/out/secret.png",
        "/dev/zero",
        "/dev/stdin",
        "..%2fsecret.png",
        "pictures/../../secret.png",
    ],
)
def test_no_path_leaves_the_folder(server, folder, path):
    seconds = fault_server.stopwatch()
    seen = ask(tool(server, folder), path.replace("{folder}", str(folder)))
    assert (seen.ok, seen.outcome) == (False, "error")
    assert seen.text.startswith("The image cannot be opened: ")
    assert seconds() < 10


def test_without_a_folder_no_file_is_read(server, folder):
    assert ask(tool(server), str(folder / "a.png")).outcome == "error"


def test_addresses_are_fetched_within_the_guard(server):
    allowed = tool(server, allow_hosts=("127.0.0.1",))
    assert ask(allowed, server.url("/picture")).text.startswith("data:image/png")
    closed = ask(tool(server), server.url("/picture"))
    assert "does not belong to the public internet" in closed.text
    assert "type text/html" in ask(allowed, server.url("/page")).text


def test_what_is_no_image_or_too_large_is_said(server, folder, monkeypatch):
    assert "no image of a known type" in ask(tool(server, folder), "note.png").text
    liar = ask(tool(server, allow_hosts=("127.0.0.1",)), server.url("/liar"))
    assert "no image of a known type" in liar.text
    monkeypatch.setattr(visual_inspector, "_MAX_BYTES", 20)
    assert "too large" in ask(tool(server, folder), "a.png").text


@pytest.mark.parametrize(
    ("path", "outcome"), [("/500", "fault"), ("/malformed", "fault"), ("/hang", "timeout")]
)
def test_a_model_that_fails_is_said_in_time(server, folder, path, outcome):
    seen = ask(tool(server, folder, path), "a.png", deadline=0.8)
    assert seen.outcome == outcome and "Go on without it" in seen.text
    assert seen.seconds < 10  # of 30


def test_a_model_without_eyes_is_no_mistake_of_the_policy(server, folder):
    server.pages["/text/chat/completions"] = lambda h: h.json(
        {"error": {"message": "image_url is not supported by this model"}}, 400
    )
    inspector = tool(server, folder, "/text")
    assert [ask(inspector, "a.png").outcome for _ in range(2)] == ["fault", "fault"]


def test_without_a_model_every_call_says_so():
    seen = ask(VisualInspector(VisualConfig()), "a.png")
    assert seen.outcome == "error" and "No model that can look at images" in seen.text


@pytest.mark.parametrize("body", ["a.png", "{}", '{"file_path": 3}'])
def test_calls_that_cannot_be_read(server, body):
    seen = asyncio.run(call_tool(tool(server), body, ToolContext()))
    assert seen.outcome == "bad_call" and "file_path" in seen.text


def test_a_missing_folder_is_explained(tmp_path):
    with pytest.raises(UserError, match="absent is not a folder"):
        VisualInspector(VisualConfig(folder=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"BM6", "image/bmp"),
        (b"<svg onload=alert(1)>", None),
        (b"", None),
    ],
)
def test_types_are_read_from_the_bytes(start, kind):
    assert image_type(start) == kind
