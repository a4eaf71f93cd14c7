"""Settings that hold for the whole suite, made before any test imports JAX."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from coa_jax.parallel.compilation_cache import enable_compilation_cache

# The suite is meant for a CPU; name the platform explicitly to run it elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use what is on the disk: a look-up on a hub would make them depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Folders of this run of the suite, which its processes share: token counts of records, the trained
# tiny policy, and bytecode.
_FOLDERS = ["COA_JAX_LENGTHS", "COA_JAX_TINY_POLICY"]
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Without bytecode, each command that a test starts compiles again the modules of this package,
    # and those of other packages unless pip compiled them.
    sys.dont_write_bytecode = False
    _FOLDERS.append("PYTHONPYCACHEPREFIX")
for _name in _FOLDERS:
    if _name not in os.environ:
        os.environ[_name] = tempfile.mkdtemp(prefix="coa_jax-tests-")
        atexit.register(shutil.rmtree, os.environ[_name], ignore_errors=True)
sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
# Compiled programs are kept for the next run of the suite.  A program that is older than two weeks
# goes, so that the folder does not grow without end.
_PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "programs"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # not in the processes that this one starts
    for _program in _PROGRAMS.glob("*/*"):
        if _program.stat().st_mtime < time.time() - 14 * 24 * 3600:
            _program.unlink(missing_ok=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
enable_compilation_cache(_PROGRAMS)
# Most of the suite's time is XLA's work on programs that run for milliseconds.  Tests of what this
# work decides (bits under other shapes, memory, copies) use the fixture `optimized`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA 0.10 can emit loops without MLIR, in a third of the time; later versions cannot.
_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", _QUICK)

# A shell lets what it starts in the background ignore Ctrl-C, and children inherit that: tests that
# interrupt a command would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compilation makes the first example slow, so no per-example deadline; the same examples each run.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--shard``."""
    parser.addoption("--shard", default="1/1", help="2/4 runs the second quarter of the files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of other shards, without importing them."""
    number, of = map(int, config.getoption("shard").split("/"))
    name = collection_path.relative_to(config.rootpath).as_posix()
    other = zlib.crc32(name.encode()) % of != number - 1
    return True if other and collection_path.suffix == ".py" else None


def pytest_collection_finish() -> None:
    """Takes what all tests share out of the garbage collection, which would visit it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # tracing makes many objects, and few cycles


@pytest.fixture(autouse=True)
def protocols_of_one_test():
    """Takes the protocols that a test's tools bring out again: runs write those of the process."""
    from coa_jax.protocol import spec

    before = dict(spec._PROTOCOLS)
    yield
    spec._PROTOCOLS.clear()
    spec._PROTOCOLS.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets the tests that need optimized programs come last, because `optimized` is not undone."""
    items.sort(key=lambda item: "optimized" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def optimized() -> None:
    """Compiles all further programs of this process as a user's run does."""
    import jax
    from jax._src import compiler

    if not jax.config.read("jax_disable_most_optimizations"):
        return
    few = compiler.get_compile_options

    def all_of_them(*args, **kwargs):
        options = few(*args, **kwargs)
        options.env_option_overrides += [("xla_cpu_use_fusion_emitters", True)]
        return options

    if os.environ.get("XLA_FLAGS") == _QUICK:
        compiler.get_compile_options = all_of_them
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(scope="session")
def cpu_ops() -> None:
    """Skips a test of bits or speed that only the operations of `model.ops_cpu` promise."""
    if os.environ.get("COA_JAX_OPS", "cpu") != "cpu" or not find_spec("coa_jax.model.ops_cpu"):
        pytest.skip("needs the operations of model.ops_cpu")


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of `model.compute` that is here."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_ops")
    return request.param
