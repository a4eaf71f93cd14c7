"""The part of ``gcloud compute tpus`` that the launch scripts use, with folders as hosts.

    python -m tests.local_gcloud compute tpus tpu-vm ssh NAME --zone=Z --worker=all --command=...

A slice is a folder of LOCAL_CLOUD with one folder for each of its four hosts, the home directory of
what runs there.  A command is run on all hosts at the same time, and the process of each host finds
the others as on TPUs: JAX reads the variables of a TPU worker.  A test preempts a slice by killing
the processes in ``NAME/groups`` and writing SUSPENDED to ``NAME/state``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HOSTS = 4
CLOUD = Path(os.environ["LOCAL_CLOUD"])


def main(words: list[str]) -> int:
    named = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "--command" in words:
        named["command"] = words[words.index("--command") + 1]
    _, _, service, verb, *rest = words
    with (CLOUD / "log").open("a") as log:
        log.write(f"{service} {verb} {named.get('command', '')[-160:]!r}\n")
    if service == "tpu-vm":
        assert named["worker"] == "all"
        if verb == "ssh":
            return ssh(rest[0], named["command"])
        source, target = rest[0], rest[1]
        name, _, path = target.partition(":")
        for home in homes(name):
            shutil.copy(source, home / path)
        return 0
    folder = CLOUD / rest[0]
    state = folder / "state"
    if verb == "create":
        if state.exists():
            print("ALREADY_EXISTS: there is such a request", file=sys.stderr)
            return 1
        for home in homes(rest[0]):
            home.mkdir(parents=True)
        state.write_text("WAITING_FOR_RESOURCES")
        return 0
    if not state.exists():
        print("NOT_FOUND: no such request", file=sys.stderr)
        return 1
    if verb == "describe":
        assert named["format"] == "value(state.state)"
        print(state.read_text())
        if state.read_text() == "WAITING_FOR_RESOURCES":
            state.write_text("ACTIVE")
        return 0
    assert verb == "delete", verb
    shutil.rmtree(folder)
    return 0


def homes(name: str) -> list[Path]:
    return [CLOUD / name / f"host{number}" for number in range(HOSTS)]


def ssh(name: str, command: str) -> int:
    """Runs a command on all hosts; the first exit code that is not 0, and 255 without a host."""
    state, groups = CLOUD / name / "state", CLOUD / name / "groups"
    if not state.exists() or state.read_text() != "ACTIVE":
        return 255
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=home,
            env={
                **HOST,
                "HOME": str(home),
                "TPU_WORKER_ID": str(number),
                "JAX_COORDINATOR_PORT": str(port),
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number, home in enumerate(homes(name))
    ]
    groups.write_text("\n".join(str(process.pid) for process in running))
    codes = [process.wait() for process in running]
    if not state.exists() or state.read_text() != "ACTIVE":
        return 255  # the hosts have gone away, and their connections with them
    groups.unlink()
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


HOST = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "JAX_PLATFORMS": "cpu",
    "JAX_FORCE_TPU_INIT": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * HOSTS),
    # Else JAX asks the metadata server of a cloud.
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1",
    "MEGASCALE_NUM_SLICES": "1",
    "MEGASCALE_SLICE_ID": "0",
}
"""Variables of a host: those of a worker of a TPU slice, whose chip is a CPU."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
