"""Packages of the code tool: installed by pip, imported in the sandbox, told to the policy."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

from coa_jax.errors import UserError
from coa_jax.perf.device.doctor import main
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.sandbox.isolation import find_interpreter, reachable
from coa_jax.tasks import code_tests
from coa_jax.tools import code_libraries
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.code import CodeConfig, CodeTool
from coa_jax.tools.code_libraries import Libraries, Package, find_libraries
from coa_jax.tools.make import ToolsConfig, make_tools


@pytest.fixture(scope="module")
def shared():
    """A directory that any user can read, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def write_wheel(place, name, module="", text=""):
    """A wheel of a package ``NAME-VERSION`` with one module or none."""
    title, version = name.rsplit("-", 1)
    about = f"{title.replace('-', '_')}-{version}"
    with zipfile.ZipFile(place / f"{about}-py3-none-any.whl", "w") as wheel:
        if module:
            wheel.writestr(f"{module}.py", text)
            wheel.writestr(f"{about}.dist-info/top_level.txt", f"{module}\n")
        for file, lines in (
            ("METADATA", f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"{about}.dist-info/{file}", lines)


@pytest.fixture(scope="module")
def wheels(shared):
    """Wheels of a small package, in two versions."""
    place = shared / "wheels"
    place.mkdir()
    for version in ("1.0", "2.0"):
        text = f"VERSION = {version!r}\ndef add(x, y): return x + y\n"
        write_wheel(place, f"tiny-sums-{version}", "tinysums", text)
    return place


@pytest.fixture
def offline(shared, wheels, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")  # is ours, not that of the sandbox's python


def ask(tool: CodeTool, source: str):
    return asyncio.run(call_tool(tool, f"```py\n{source}\n```", ToolContext()))


def test_a_package_is_installed_once_and_told_to_the_policy(offline, shared, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    config = ToolsConfig(
        names=("code",), code=CodeConfig(libraries=("tiny-sums<2", "tiny.sums==1.0"))
    )
    (tool,) = make_tools(config)
    assert "pip installs tiny.sums==1.0 for programs into" in caplog.text
    assert tool.libraries.packages == (Package("tiny-sums", "1.0", "tinysums"),)
    seen = ask(tool, "import tinysums\nprint(tinysums.add(2, 3), tinysums.VERSION)")
    assert seen.text == "[EXECUTED]\n5 1.0"
    assert not ask(tool, "import tinysums\nopen(tinysums.__file__, 'a')").ok
    assert "tiny-sums 1.0" in tool.settings
    note = "It can import the standard library and these packages: tiny-sums 1.0."
    assert note in render_prompt(get_protocol("code"), "q")
    assert note not in render_prompt(get_protocol("mhqa"), "q")

    monkeypatch.setattr(code_libraries, "_pip", lambda *_: pytest.fail("installed again"))
    assert make_tools(config)[0].settings == tool.settings
    assert [path.name[0] for path in (shared / "cache/coa_jax/code").iterdir()] != ["."]
    (alone,) = make_tools(ToolsConfig(names=("code",)))
    assert alone.settings != tool.settings
    assert "import" not in render_prompt(get_protocol("code"), "q")
    assert "ModuleNotFoundError" in ask(alone, "import tinysums").text


def test_what_pip_cannot_install_is_one_line_and_leaves_nothing(offline, shared):
    with pytest.raises(UserError, match=r"cannot install tiny-sums>=3 .*No matching") as caught:
        find_libraries(("tiny-sums>=3",))
    assert "\n" not in str(caught.value)
    assert not list((shared / "cache/coa_jax/code").glob(".*"))


@pytest.mark.parametrize(
    "entry", ["--index-url=http://x", "a b", "", "a;b", "numpy @ http://x", "-r"]
)
def test_an_entry_that_is_no_package_is_refused(entry):
    with pytest.raises(UserError, match=r"code.libraries: .* is neither a package"):
        find_libraries((entry,))


def test_a_package_without_a_module_is_refused(offline, wheels):
    write_wheel(wheels, "tiny-bundle-1.0")
    with pytest.raises(UserError, match=r"'tiny-bundle==1\.0' contains no module"):
        find_libraries(("tiny-sums==2.0", "tiny-bundle==1.0"))


def test_a_directory_stands_in_place_of_pip(offline, shared, monkeypatch):
    made = find_libraries(("tiny-sums==2.0",)).directories[0]
    monkeypatch.setattr(code_libraries, "_pip", lambda *_: pytest.fail("not installed from a path"))
    for wanted in ((made,), (made, "tiny_sums")):
        found = find_libraries(wanted)
        assert found == Libraries((made,), (Package("tiny-sums", "2.0", "tinysums"),))
    with pytest.raises(UserError, match="there is no directory /nonexistent/packages"):
        find_libraries(("/nonexistent/packages",))
    hidden = shared / "hidden" / "packages"
    hidden.mkdir(parents=True)
    hidden.parent.chmod(0o700)
    if not reachable(str(hidden)):
        with pytest.raises(UserError, match=rf"^tools\.code\.libraries: .* {hidden}, "):
            find_libraries((str(hidden),))


def test_the_doctor_imports_them(offline, tmp_path, capsys):
    config = tmp_path / "config.py"
    tools = {"names": ("code",), "code": {"libraries": ("tiny-sums==2.0",)}}
    config.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({{'tools': {tools!r}}})\n"
    )
    assert main(["--config", str(config)]) == 0
    assert "tiny-sums 2.0, imported in 0." in capsys.readouterr().out
    broken = Path(find_libraries(("tiny-sums==2.0",)).directories[0]) / "tinysums.py"
    text = broken.read_text()
    broken.chmod(0o644)
    try:
        broken.write_text("import nothing_of_this_name")
        assert main(["--config", str(config)]) == 1
        assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().out
    finally:
        broken.write_text(text)
    assert code_libraries.main(["tiny-sums==2.0"]) == 0
    assert code_libraries.main(["no such"]) == 2


def test_programs_that_are_graded_may_import_them(offline):
    limits = code_tests.CodeLimits(libraries=("tiny-sums==2.0",))
    case = code_tests.Case("stdin", "2 3\n", "5\n")
    program = "import tinysums\nprint(tinysums.add(*map(int, input().split())))"
    tests = code_tests.Tests((case,))
    assert asyncio.run(code_tests.run_tests(program, tests, limits)).why == ""
    without = dataclasses.replace(limits, libraries=())
    assert asyncio.run(code_tests.run_tests(program, tests, without)).why == "error"


SCIENCE = """
import numpy, scipy.linalg
from concurrent.futures import ThreadPoolExecutor
matrix = numpy.arange(90000.0).reshape(300, 300) + 300 * numpy.eye(300)
print(int(scipy.linalg.eigvals(matrix @ matrix.T).real.max() > 0))
numpy.save("kept.npy", matrix)
print(float(numpy.load("kept.npy", mmap_mode="r").sum()) == float(matrix.sum()))
with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(numpy.sqrt, [4.0, 9.0])) == [2.0, 3.0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_scientific_packages_of_this_interpreter_work_in_the_sandbox(backend):
    place = sysconfig.get_path("purelib")
    version = ".".join(map(str, sys.version_info[:2]))
    if not find_interpreter().version.startswith(f"{version}.") or not reachable(place):
        pytest.skip("the sandbox's python cannot use the packages of this one")
    tool = CodeTool(libraries=(place, "numpy", "scipy"), backend=backend, timeout_s=60, cpu_s=30)
    assert ask(tool, SCIENCE).text == "[EXECUTED]\n1\nTrue\nTrue"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_packages_of_the_index_work_within_the_default_limits(backend):
    try:
        urllib.request.urlopen("https://pypi.org/simple/numpy/", timeout=10).close()
    except OSError:
        pytest.skip("no package index can be reached")
    tool = CodeTool(libraries=("numpy", "pandas", "sympy"), backend=backend)
    source = "import pandas\nprint(pandas.DataFrame({'a': [1, 2]}).a.mean())"
    assert ask(tool, source).text == "[EXECUTED]\n1.5"
    source = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.integrate(2 * x, (x, 0, 3)))"
    assert ask(tool, source).text == "[EXECUTED]\n9"
