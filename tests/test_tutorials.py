"""The tutorials work: their files are written and their commands run, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_HERE = ("# needs a TPU", "# not run by the tests")
COMMAND = """#!{python}
import sys
from coa_jax.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [
        ["tutorials/own_data"],
        pytest.param(["tutorials/on_a_cpu"], marks=pytest.mark.timeout(1800)),  # trains for minutes
        ["tutorials/own_tool"],
        ["tutorials/own_reward"],
        ["tutorials/own_environment"],
        ["tutorials/own_system"],
        ["tutorials/own_model", "debugging"],
        ["tutorials/pod"],
    ],
    ids=lambda pages: pages[0],
)
def test_a_reader_can_follow_the_pages(tmp_path, pages):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "coa-jax").write_text(COMMAND.format(python=sys.executable))
    (programs / "coa-jax").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # as for a reader; training is far faster
        "XLA_FLAGS": "",
    }
    folder = tmp_path / "empty"
    folder.mkdir()
    said = ""
    pages_text = "".join((REPOSITORY / f"docs/{page}.md").read_text() for page in pages)
    for kind, text in BLOCK.findall(pages_text):
        if kind == "python":
            file = re.match(r"# (\w+\.py)\n", text)
            assert file, f"the block has no file name: {text}"
            (folder / file[1]).write_text(text)
        elif text.startswith(NOT_HERE):
            continue
        elif kind == "bash":
            done = subprocess.run(
                ["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
            said = done.stdout
        else:
            assert said == text
