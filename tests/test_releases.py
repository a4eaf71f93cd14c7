"""Metadata of a release: its version, its images and its workflow."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml

import coa_jax

REPOSITORY = Path(__file__).resolve().parent.parent


def test_the_version_of_the_citation_and_of_the_changelog_is_that_of_the_package():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == coa_jax.__version__
    assert {"cff-version", "message", "title", "authors", "license", "type"} <= set(citation)
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?([\d.]+)", changes, re.MULTILINE)
    assert newest
    assert newest[1] == coa_jax.__version__


def test_the_images_install_extras_and_constraints_that_there_are():
    text = (REPOSITORY / "docker" / "Dockerfile").read_text()
    installs = re.findall(r'^RUN pip install -c (\S+) "\.\[([\w,]+)\]"$', text, re.MULTILINE)
    assert len(installs) == 3
    setup = (REPOSITORY / "setup.py").read_text()
    for file, extras in installs:
        assert (REPOSITORY / file).is_file()
        assert [e for e in extras.split(",") if f'"{e}": [' not in setup] == []
    kept = (REPOSITORY / ".dockerignore").read_text()
    for name in ("coa_jax", "configs", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in"):
        assert f"!{name}\n" in kept


def test_the_workflow_runs_what_a_change_must_pass_on_the_tested_pythons():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    versions = " ".join(str(step.get("with", {}).get("python-version")) for step in steps)
    for file in (REPOSITORY / "coa_jax" / "config" / "constraints").glob("jax-*.txt"):
        assert re.search(r"Tested with Python ([\d.]+)\.$", file.read_text(), re.M)[1] in versions
