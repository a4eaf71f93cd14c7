"""Metadata of a release: its version, its images and its workflows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import coa_jax

REPOSITORY = Path(__file__).resolve().parent.parent
WORKFLOWS = REPOSITORY / ".github" / "workflows"


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


def workflow(name: str) -> dict:
    return yaml.safe_load((WORKFLOWS / name).read_text())


def runs(job: dict) -> list[str]:
    """The commands of a job."""
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_every_part_of_what_a_change_must_pass_on_the_tested_pythons():
    jobs = workflow("ci.yml")["jobs"]
    parts = jobs["check"]["strategy"]["matrix"]["part"]
    assert ".ci/run ${{ matrix.part }}" in runs(jobs["check"])
    ran = [f".ci/run {part}" for part in parts] + runs(jobs["site"]) + runs(jobs["wheel"])
    script = (REPOSITORY / ".ci" / "run").read_text()
    there = set(re.findall(r"^  (\w+)\)", script.partition('case "$part" in')[2], re.MULTILINE))
    assert {command.split()[1] for command in ran} == there - {"all"}
    shards = [part.partition("=")[2] for part in parts if part.startswith("core")]
    assert shards == [f"{n}/{len(shards)}" for n in range(1, len(shards) + 1)]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    versions = " ".join(
        str(step.get("with", {}).get("python-version")) for step in jobs["check"]["steps"]
    )
    for file in (REPOSITORY / "coa_jax" / "config" / "constraints").glob("jax-*.txt"):
        assert re.search(r"Tested with Python ([\d.]+)\.$", file.read_text(), re.M)[1] in versions


def test_a_part_that_there_is_not_gets_one_line():
    done = subprocess.run([".ci/run", "lnt"], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: lnt is no part; see the comment at the beginning of .ci/run\n"


def test_the_shards_together_run_every_test_once():
    """Files that are named run in any shard, so the folder is named."""

    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests/protocol"]
        done = subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode in (0, 5), done.stdout
        return re.findall(r"^tests/\S+: \d+$", done.stdout, re.MULTILINE)

    all_files = collected()
    shards = [collected(f"--shard={n}/2") for n in (1, 2)]
    assert len(all_files) > 3 and max(map(len, shards)) < len(all_files)
    assert sorted(shards[0] + shards[1]) == sorted(all_files)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_tag_and_keep_no_credentials(path):
    used = re.findall(r"uses: (.+)", path.read_text())
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+"
    assert [action for action in used if not re.fullmatch(pinned, action)] == []
    steps = [step for job in workflow(path.name)["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_only_the_jobs_that_publish_can_write():
    allowed = {
        ("ci.yml", "pages"): {"pages": "write", "id-token": "write"},
        ("release.yml", "publish"): {"id-token": "write"},
    }
    for path in WORKFLOWS.glob("*.yml"):
        assert workflow(path.name)["permissions"] == {"contents": "read"}
        for name, job in workflow(path.name)["jobs"].items():
            assert job.get("permissions") == allowed.get((path.name, name))
