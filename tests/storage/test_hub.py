"""Models of the Hub, from a local server that speaks its routes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coa_jax.errors import UserError
from coa_jax.model.hub_card import hub_card
from coa_jax.storage import Origin, check_push, origin_of
from coa_jax.storage.hub import hub_id
from tests.damage import samples
from tests.hub_server import TOKEN, Hub, hub_server

NAME = "Org/Tiny-1B"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.fixture
def files() -> dict[str, bytes]:
    """What a repository holds; nobody looks into the files."""
    names = ("config.json", "tokenizer.json", "model.safetensors")
    return {name: name.encode() * 100 for name in names}


def run(hub: Hub, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the Hub of the test; huggingface_hub reads its settings once a process."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **settings, "HF_HUB_DISABLE_XET": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
    )


def folder_of(place: str, *, weights: bool = True) -> tuple[str, str]:
    """A program that prints what is in the folder of a model, or why there is none."""
    lines = (
        "from coa_jax.errors import UserError",
        "from coa_jax.storage import model_folder, with_urls",
        "try:",
        f"    folder = model_folder({place!r}, weights={weights})",
        "    print(*sorted(path.name for path in folder.iterdir()), with_urls(folder))",
        "except UserError as error:",
        "    print(error)",
    )
    return "-c", "\n".join(lines)


def test_a_model_of_the_hub_is_downloaded_once(hub, files, tmp_path):
    hub.add(NAME, {**files, "pytorch_model.bin": b"torch", "onnx/model.onnx": b"onnx"})
    described = run(hub, tmp_path, *folder_of(NAME, weights=False))
    assert "model.safetensors" not in described.stdout.split(), described.stderr
    whole = run(hub, tmp_path, *folder_of(NAME))
    assert whole.stdout.split() == [*sorted(files), NAME], whole.stderr
    assert not [r for r in hub.requests if "pytorch_model" in r or "onnx" in r]
    hub.requests.clear()
    assert run(hub, tmp_path, *folder_of(NAME)).stdout == whole.stdout
    assert not [r for r in hub.requests if r.startswith("GET") and "resolve" in r]
    offline = run(hub, tmp_path, *folder_of(NAME), HF_HUB_OFFLINE="1")
    assert offline.stdout == whole.stdout


def test_a_revision_is_the_one_that_was_asked_for(hub, files, tmp_path):
    first = hub.add(NAME, {**files, "note.txt": b"first"})
    hub.add(NAME, {"note.txt": b"second"})
    code = (
        "from coa_jax.storage import model_folder as at\nprint((at({!r}) / 'note.txt').read_text())"
    )
    for place, text in ((f"{NAME}@{first}", "first"), (NAME, "second")):
        done = run(hub, tmp_path, "-c", code.format(place))
        assert done.stdout.strip() == text, done.stderr


def model_of(*places: str) -> tuple[str, str]:
    """A program that describes models: the number of layers, or why there is no model."""
    lines = (
        "from coa_jax.errors import UserError",
        "from coa_jax.model.api import describe_model",
        "from coa_jax.storage import with_urls",
        f"for place in {places!r}:",
        "    try:",
        "        print(describe_model(place).config.num_layers)",
        "    except UserError as error:",
        "        print(with_urls(str(error)))",
    )
    return "-c", "\n".join(lines)


@pytest.mark.slow
def test_a_gguf_file_of_the_hub_is_a_model(hub, tmp_path):
    samples.write_model(tmp_path / "model")
    samples.write_gguf(tmp_path / "model.gguf", tmp_path / "model")
    data = (tmp_path / "model.gguf").read_bytes()
    card = {"README.md": b"a card", "config.json": b"{}"}  # some repositories have both
    hub.add("Org/One-GGUF", {**card, "model-Q8_0.gguf": data})
    hub.add("Org/Two-GGUF", {"a-Q4.gguf": b"GGUF" + b"no model" * 9, "b-F32.gguf": data})
    hub.add("Org/Both", {**card, "model.safetensors": b"safetensors", "b.gguf": data})
    places = ("Org/One-GGUF", "Org/Two-GGUF:b-F32.gguf", "Org/Both:b.gguf", "Org/Two-GGUF",
              "Org/Two-GGUF:c.gguf", "Org/Two-GGUF:a-Q4.gguf", "Org/Both")  # fmt: skip
    done = run(hub, tmp_path / "home", *model_of(*places))
    *layers, several, missing, damaged, both = done.stdout.splitlines()
    assert layers == ["2"] * 3, done.stderr
    assert several == (
        "Org/Two-GGUF: the repository has 2 GGUF files; name one of them, as in "
        "Org/Two-GGUF:a-Q4.gguf (a-Q4.gguf, b-F32.gguf)"
    )
    assert missing == (
        "Org/Two-GGUF:c.gguf: the repository has no file c.gguf; correct the name of the file"
    )
    assert damaged.startswith("Org/Two-GGUF/a-Q4.gguf is truncated or not a GGUF file")
    assert "config.json: architecture none is not supported" in both  # not the GGUF file
    cached = run(hub, tmp_path / "home", *model_of(*places[:2]), HF_HUB_OFFLINE="1")
    assert cached.stdout.splitlines() == layers[:2], cached.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "env", "said"),
    [
        ("Org/Nothing", {}, "there is no such folder here, and the Hub has no such model"),
        (f"{NAME}@{'0' * 40}", {}, "the model has no such revision on the Hub"),
        ("Org/Gated", {}, "its authors give access on request"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "its files are not in the cache of the Hub"),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "its files are not in the cache of the Hub"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, files, tmp_path, place, env, said):
    hub.add(NAME, files)
    hub.add("Org/Gated", files)
    hub.gated.add("Org/Gated")
    done = run(hub, tmp_path, *folder_of(place), **env)
    assert done.stdout.startswith(f"{place}: "), done.stderr
    assert said in done.stdout


def test_a_command_that_the_hub_refuses_says_so_in_a_line(hub, tmp_path):
    done = run(hub, tmp_path, "-m", "coa_jax.cli.ask", "--model=Org/Nothing", "who?")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: Org/Nothing: there is no such folder")


def architecture(*places: str) -> tuple[str, str]:
    """A program that prints the name and number of layers of each architecture, or the error."""
    lines = (
        "from coa_jax.errors import UserError",
        "from coa_jax.model.architectures import architecture_of",
        f"for place in {places!r}:",
        "    try:",
        "        name, config = architecture_of(place)",
        "        print(name, config.num_layers)",
        "    except UserError as error:",
        "        print(error)",
    )
    return "-c", "\n".join(lines)


def test_the_architecture_of_a_model_of_the_hub_comes_from_its_config(hub, tmp_path):
    samples.write_model(tmp_path / "model")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    base, adapter = "Org/Qwen2.5-7B-Pruned", {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    hub.add(base, whole)
    first = hub.find(base, "main")
    assert first is not None
    hub.add(base, {"config.json": b"{}"})
    text = json.dumps({**adapter, "base_model_name_or_path": base, "revision": first[0]})
    hub.add("Org/Adapter", {"adapter_config.json": text.encode()})
    hub.add("Org/Qwen2.5-3B-GGUF", {"a.gguf": b"GGUF", "README.md": b"a card"})
    places = (f"{base}@{first[0]}", "Org/Adapter", "Org/Qwen2.5-3B-GGUF", "Org/Qwen3-4B-Private")
    done = run(hub, tmp_path / "home", *architecture(*places))
    here = f"{places[0]} 2"
    assert done.stdout.splitlines() == [here, here, "qwen2.5-3b 36", "qwen3-4b 36"], done.stderr
    assert {name for name, _ in hub.served} == {"config.json", "adapter_config.json"}
    cached = run(hub, tmp_path / "home", *architecture(*places[:2]), HF_HUB_OFFLINE="1")
    assert cached.stdout.splitlines() == [here, here], cached.stderr


def test_without_network_an_architecture_is_known_by_its_name(hub, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        done = run(hub, tmp_path, *architecture("Qwen/Qwen2.5-7B"), HF_ENDPOINT=url)
        assert time.monotonic() - start < 30
    assert done.stdout.strip() == "qwen2.5-7b 28", done.stderr
    refused = run(hub, tmp_path, *architecture("Org/Other"), HF_ENDPOINT="http://127.0.0.1:9")
    assert "the Hub cannot be reached" in refused.stdout, refused.stderr
    assert "the path names no architecture; known are tiny" in refused.stdout


def test_a_path_that_exists_is_no_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_id("runs/sft") == ("runs/sft", None, None)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    assert hub_id("runs/sft") is None
    for place in ("/mnt/a", "./a/b", "gs://a/b", "a", "a/b/c", "a/../b"):
        assert hub_id(place) is None
    assert hub_id("Org/Name@refs/pr/1") == ("Org/Name", "refs/pr/1", None)
    assert hub_id("Org/Name@v1:q/a-Q4.gguf") == ("Org/Name", "v1", "q/a-Q4.gguf")
    assert hub_id("Org/Name:a.bin") is None


def test_a_model_is_pushed_with_its_large_files(hub, files, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text(
        hub_card(Origin("Qwen/Qwen3-4B", *["Qwen/Qwen3-4B"] * 2), "rl", 7, {}, {})
    )
    code = (
        "from pathlib import Path\nfrom coa_jax.storage import push_model\n"
        f"print(push_model(Path({str(folder)!r}), {NAME!r}, 'rl step 7'))"
    )
    done = run(hub, tmp_path / "home", "-c", code, HF_TOKEN=TOKEN)
    found = hub.find(NAME, "main")
    assert found is not None, done.stderr
    assert done.stdout.strip() == f"{hub.url}/{NAME}/commit/{found[0]}"
    assert {name: found[1][name] for name in files} == files
    assert hub.messages == ["rl step 7"]
    assert b"base_model: Qwen/Qwen3-4B\n" in found[1]["README.md"]
    assert list(hub.objects.values()) == [files["model.safetensors"]]


def test_a_push_without_a_token_or_a_name_is_refused_at_the_start(hub, tmp_path):
    with pytest.raises(UserError, match=r"^--push=model: "):
        check_push("model")
    done = run(
        hub, tmp_path, "-m", "coa_jax.cli.export", f"--workdir={tmp_path}", "--push=Org/Name"
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: --push=Org/Name: no token for the Hub; run `hf auth login` or set HF_TOKEN"
    )


def test_the_card_of_a_pushed_model_names_no_path_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"seed": 3, "optimizer": {"learning_rate": 1e-5}, "data": "gs://secret/data"}
    text = hub_card(Origin("gs://secret/models/Base"), "sft", 12, config, {"protocol": "web"})
    assert "secret" not in text and "base_model" not in text
    other = hub_card(origin_of("weights/SmolLM2-135M-Instruct"), "sft", 3, {}, {})
    assert "base_model" not in other and "| SmolLM2-135M-Instruct |" in other
    assert "| base model | Base |" in text and "| protocol | web |" in text
    assert "| optimizer: learning_rate | 1e-05 |" in text
