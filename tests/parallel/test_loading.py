"""Several processes together read each part of a model once."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import join, split_trained
from coa_jax.model.peft_io import save_trained
from coa_jax.model.safetensors_io import local_checkpoint
from coa_jax.model.tokenizer import MissingTokenizer
from tests.damage import samples
from tests.hub_server import Hub, hub_server
from tests.parallel.launched import ROOT, launch
from tests.random_params import random_params

# Rows that neither the processes nor the axes of a mesh divide.
CONFIG = ModelConfig("qwen2", 383, 48, 90, 3, 6, 2, 12, qkv_bias=True, tie_embeddings=False)


def saved(folder: Path) -> int:
    """Saves a model in several shards; returns the bytes of its parameters."""
    params = random_params(CONFIG)
    model = Model(CONFIG, params, MissingTokenizer(folder))
    save_model(model, folder, dtype="bfloat16", max_shard_bytes=40_000)
    return sum(2 * x.size for x in jax.tree.leaves(params))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.mark.parametrize(
    ("processes", "devices", "sizes"),
    [
        (2, 2, "1,2,2"),
        pytest.param(4, 1, "1,2,2", marks=pytest.mark.slow),
        pytest.param(2, 4, "2,2,2", marks=pytest.mark.slow),
    ],
)
def test_all_processes_together_read_the_bytes_of_a_model_once(tmp_path, processes, devices, sizes):
    total = saved(tmp_path / "model")
    command = ("-m", "tests.parallel.counted_loading", str(tmp_path / "model"), sizes)
    done = launch(processes, devices, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == processes
    read = [int(count) for count in re.findall(r"read (\d+)", done.stdout)]
    assert len(read) == processes
    assert sum(read) <= 1.05 * total
    assert max(read) <= 1.1 * total / processes


def settings_of(hub: Hub, home: Path) -> dict[str, str]:
    """Environment of processes that use a Hub of a test, with ``home`` for the cache."""
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **online}


def fetched(hub: Hub, copy: Path, **env: str) -> list[int]:
    """Loads a model of the Hub in two processes, which compare the parameters with a local copy.

    Returns:
        Number of bytes of each part of a safetensors file that the Hub has sent.
    """
    hub.served.clear()
    command = ("-m", "tests.parallel.counted_loading", "Org/Tiny", "1,2,2", str(copy))
    done = launch(2, 2, *command, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
    return [size for name, size in hub.served if name.endswith(".safetensors")]


@pytest.mark.slow
def test_all_processes_together_fetch_a_model_of_the_hub_once(hub, tmp_path):
    folder = tmp_path / "model"
    total = saved(folder)
    hub.add("Org/Tiny", {file.name: file.read_bytes() for file in folder.iterdir()})
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    sizes = fetched(hub, folder, **settings_of(hub, tmp_path / "home"))
    assert total <= sum(sizes) <= 1.05 * total + 2 * (sum(shards) - total)  # each reads all headers
    # In each process a request for each tensor, and two for the header of each shard.
    assert len(sizes) == 2 * (len(local_checkpoint(folder).shapes) + 2 * len(shards))
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.slow
def test_weights_of_the_hub_that_are_in_the_cache_are_not_fetched(hub, tmp_path):
    folder, env = tmp_path / "model", settings_of(hub, tmp_path / "home")
    saved(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.add("Org/Tiny", files)
    code = "from coa_jax.model.api import load_weights; load_weights('Org/Tiny')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, **env})
    assert dict(hub.served) == {name: len(data) for name, data in files.items()}
    assert fetched(hub, folder, **env) == []
    hub.requests.clear()
    assert fetched(hub, folder, **{**env, "HF_HUB_OFFLINE": "1"}) == hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf", "adapter"])
def test_other_files_of_a_model_of_the_hub_are_downloaded_by_one_host(hub, tmp_path, kind):
    base, copy = tmp_path / "base", tmp_path / "copy"
    samples.write_model(base)
    hub.add("Org/Base", {file.name: file.read_bytes() for file in base.iterdir()})
    if kind == "gguf":
        copy = copy.with_suffix(".gguf")
        samples.write_gguf(copy, base)
        hub.add("Org/Model", {"model.gguf": copy.read_bytes(), "README.md": b"a card"})
    elif kind == "adapter":
        model = load_model(base)
        config = dataclasses.replace(model.config, lora=LoraConfig(rank=2, alpha=4.0))
        params = jax.tree.map(lambda x: x + 0.1, join(*split_trained(model.params, config, seed=1)))
        trained = model.replace(config=config, params=params)
        settings = {"optimizer": {"total_steps": 1}}
        save_trained(trained, str(base), tmp_path / "trained", "float32", "sft", settings)
        (tmp_path / "trained-adapters").rename(copy)
        files = {file.name: file.read_bytes() for file in copy.iterdir()}
        config_file = files["adapter_config.json"].replace(str(base).encode(), b"Org/Base")
        hub.add("Org/Model", {**files, "adapter_config.json": config_file})
    else:
        copy = base
        hub.add("Org/Model", {file.name: file.read_bytes() for file in base.iterdir()})
    for number in range(2):
        (tmp_path / f"disk{number}").mkdir()
        (tmp_path / f"host{number}").symlink_to(tmp_path / f"disk{number}")
    command = ("-m", "tests.parallel.counted_loading", "Org/Model", "1,2,1", str(copy))
    env = settings_of(hub, tmp_path) | {"HOST": str(tmp_path / "host")}
    done = launch(2, 1, *command, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
    parts = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # read by requests of ranges
    served = Counter(name for name, _ in hub.served if not parts.fullmatch(name))
    assert served and set(served.values()) == {1}, served
    # The second host has the same files in its cache, but no safetensors of the base model.
    caches = [tmp_path / f"host{number}" / "hub" for number in range(2)]
    there, copied = (
        {str(path.relative_to(cache)): path.read_bytes() for path in cache.glob("*/snapshots/*/*")}
        for cache in caches
    )
    assert there == copied and {Path(name).name for name in there} >= served.keys()
    assert not any(parts.fullmatch(Path(name).name) for name in there)


@pytest.mark.slow
def test_processes_with_different_commits_of_a_model_are_refused(hub, tmp_path):
    folder, env = tmp_path / "model", settings_of(hub, tmp_path / "home")
    saved(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    commits = [hub.add("Org/Tiny", files), hub.add("Org/Tiny", files)]
    code = (
        "from coa_jax.errors import UserError",
        "from coa_jax.model.api import load_weights",
        "from coa_jax.parallel import processes",
        "from coa_jax.parallel.mesh import make_mesh",
        "processes.join()",
        "try:",
        f"    load_weights('Org/Tiny@' + {commits!r}[processes.index()], make_mesh(1, 2, 1))",
        "except UserError as error:",
        "    print(error)",
    )
    done = launch(2, 1, "-c", "\n".join(code), **env)
    said = f"have different commits of the model; name one of them, as in Org/Tiny@{max(commits)}"
    assert done.stdout.count(said) == 2, done.stderr[-3000:]
