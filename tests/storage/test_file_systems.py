"""Places by URL: what is read from where, and what stores refuse."""

from __future__ import annotations

import errno
import io
import json
import secrets
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from coa_jax import storage
from coa_jax.cli import check
from coa_jax.cli.needs import needs_of, paths_of, settings_of
from coa_jax.data.records import read_records
from coa_jax.data.rows import find_files
from coa_jax.distillation.export import write_tfds
from coa_jax.errors import Outage, UserError
from coa_jax.files import jsonl
from coa_jax.model.api import load_model, save_model
from coa_jax.model.safetensors_io import INDEX_FILE, SINGLE_FILE, Checkpoint, local_checkpoint
from coa_jax.report import watch
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.storage import checkpoint_folders
from coa_jax.storage.file_systems import explain_store_errors, url_to_fs
from coa_jax.train.config import RFTConfig
from tests import tiny_policy
from tests.buckets import free_port


def put(url: str, text: str) -> None:
    with storage.output(url) as path:
        path.write_text(text)


# --- inputs and outputs --------------------------------------------------------------------


def test_an_input_is_copied_once_and_again_when_it_changes(bucket):
    put(f"{bucket}/a.jsonl", '{"n": 1}\n')
    first = Path(storage.local(f"{bucket}/a.jsonl"))
    before = first.stat()
    assert storage.local(f"{bucket}/a.jsonl") == str(first)
    assert first.stat().st_mtime_ns == before.st_mtime_ns and first.stat().st_ino == before.st_ino
    put(f"{bucket}/a.jsonl", '{"n": 22}\n')
    assert Path(storage.local(f"{bucket}/a.jsonl")).read_text() == '{"n": 22}\n'


def test_patterns_folders_and_lists_name_files_as_they_do_locally(bucket):
    for name in ("x/a.jsonl", "x/b.jsonl", "y/c.json"):
        put(f"{bucket}/{name}", "{}\n")
    for source, names in (
        (f"{bucket}/x/*.jsonl", ["a.jsonl", "b.jsonl"]),
        (f"{bucket}/x", ["a.jsonl", "b.jsonl"]),
        (f"{bucket}/x/b.jsonl, {bucket}/y/c.json", ["b.jsonl", "c.json"]),
    ):
        assert [path.name for path in find_files(source)] == names


def test_a_copy_has_the_files_that_describe_it_and_no_checkpoints(bucket):
    for name in ("run/traces.jsonl", "run/protocols.json", "run/checkpoints/rl/1/state"):
        put(f"{bucket}/{name}", "{}\n")
    assert (Path(storage.local(f"{bucket}/run/traces.jsonl")).parent / "protocols.json").is_file()
    names = {path.name for path in Path(storage.local(f"{bucket}/run")).rglob("*")}
    assert names == {"traces.jsonl", "protocols.json"}
    url_to_fs(bucket)[0].rm(f"{bucket}/run/protocols.json")
    copy = Path(storage.local(f"{bucket}/run/traces.jsonl"))
    assert copy.is_file() and not (copy.parent / "protocols.json").exists()


def test_a_tfds_export_in_a_bucket_is_read(bucket, tmp_path):
    folder = write_tfds(tiny_policy.records(), tmp_path, "train")
    storage.upload(folder, f"{bucket}/coa/1.0.0")
    found = read_records(f"tfds:{bucket}/coa/1.0.0:train[1:]")
    assert found == list(tiny_policy.records()[1:])


def test_an_object_that_was_removed_from_the_bucket_is_no_input(bucket):
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        put(f"{bucket}/x/{name}", "{}\n")
    places = (f"{bucket}/x/*.jsonl", f"{bucket}/x")
    assert len(find_files(places[0])) == 2
    assert len(list(Path(storage.local(places[1])).iterdir())) == 3
    url_to_fs(bucket)[0].rm(f"{bucket}/x/a.jsonl")
    assert [path.name for path in find_files(places[0])] == ["b.jsonl"]
    left = [path.name for path in Path(storage.local(places[1])).iterdir()]
    assert sorted(left) == ["b.jsonl", "c.json"]
    storage.local(f"{bucket}/x/c.json")
    assert [path.name for path in find_files(places[0])] == ["b.jsonl"]


def test_messages_name_the_url_and_not_the_copy(bucket):
    put(f"{bucket}/bad.jsonl", '{"a": 1}\nnonsense\n')
    with pytest.raises(UserError) as seen:
        list(jsonl.read_lines(storage.local(f"{bucket}/bad.jsonl"), dict))
    assert storage.with_urls(str(seen.value)).startswith(f"{bucket}/bad.jsonl:2: not JSON")


def test_an_output_folder_replaces_what_was_there(bucket):
    for names in (("a", "b"), ("b", "c")):
        with storage.output(f"{bucket}/out") as folder:
            folder.mkdir()
            for name in names:
                (folder / name).write_text("".join(names))
    copy = Path(storage.local(f"{bucket}/out"))
    assert storage.exists(f"{bucket}/out/c") and not storage.exists(f"{bucket}/out/a")
    assert (copy / "b").read_text() == "bc"


def test_a_failed_command_leaves_no_output(bucket):
    with pytest.raises(RuntimeError), storage.output(f"{bucket}/out") as folder:
        folder.mkdir()
        (folder / "half").write_text("1")
        raise RuntimeError
    assert not storage.exists(f"{bucket}/out")


# --- weights -------------------------------------------------------------------------------


def test_rows_of_a_tensor_are_fetched_alone(bucket, tmp_path):
    values = np.random.default_rng(0)
    tensors = {
        "half": values.standard_normal((7, 5)).astype(np.float16),
        "wide": values.standard_normal((300, 20)).astype(np.float32),
        "flat": values.standard_normal(9),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    storage.upload(tmp_path, f"{bucket}/m")
    files = storage.weights_apart(f"{bucket}/m")
    assert files is not None
    there, here = Checkpoint("m", files), local_checkpoint(tmp_path)
    assert there.shapes == here.shapes
    for name in tensors:
        for rows in (slice(None), slice(2, 5), slice(5, 5), slice(1, 7)):
            left, right = there.read(name, rows), here.read(name, rows)
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype and left.shape == right.shape


def test_only_shards_of_the_index_are_read_from_a_bucket(bucket, tmp_path):
    model = tiny_policy.policy()
    save_model(model, tmp_path / "m")
    storage.upload(tmp_path / "m", f"{bucket}/m")
    # A shard of an earlier save; its name sorts after the file of the index.
    stale = {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)}
    save_file(stale, tmp_path / "m" / "z.safetensors")
    index = {"weight_map": dict.fromkeys(local_checkpoint(tmp_path / "m").shapes, SINGLE_FILE)}
    (tmp_path / "m" / INDEX_FILE).write_text(json.dumps(index))
    storage.upload(tmp_path / "m", f"{bucket}/m")
    there, here = load_model(f"{bucket}/m").params, load_model(tmp_path / "m").params
    jax.tree.map(np.testing.assert_array_equal, there, here)


@pytest.mark.parametrize(
    "content", [b"\x01", b"\xff" * 100, b"\x10" + b"\0" * 7 + b"[1,2,3]         "]
)
def test_damaged_weights_in_a_bucket_are_named(bucket, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    storage.upload(tmp_path, f"{bucket}/m")
    files = storage.weights_apart(f"{bucket}/m")
    assert files is not None
    with pytest.raises(UserError, match=r"m/model\.safetensors is truncated or not a"):
        Checkpoint("m", files)


def test_weights_that_end_too_soon_in_a_bucket_are_named(bucket, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones((300, 20), np.float32)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    storage.upload(tmp_path, f"{bucket}/m")
    files = storage.weights_apart(f"{bucket}/m")
    assert files is not None
    with pytest.raises(UserError, match=r"m/model\.safetensors is truncated .*within tensor a"):
        Checkpoint("m", files).read("a")


# --- refusals ------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_named(bucket):
    url = bucket.replace("bucket", f"no-{secrets.token_hex(4)}", 1)
    with pytest.raises(UserError, match=r"there is no bucket 'no-\w+', or these credentials"):
        storage.check_reachable(f"{url}/x")
    storage.check_reachable(f"{bucket}/not/there/yet")
    with pytest.raises(UserError, match=f"^{bucket}/not/there/yet: "):
        storage.local(f"{bucket}/not/there/yet")


class HttpError(Exception):
    """As gcsfs names its own."""


class NoCredentialsError(Exception):
    """As botocore names its own."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NoCredentialsError("Unable to locate credentials"), "no valid credentials"),
        (HttpError("Anonymous caller does not have storage.objects.list access"), "credentials"),
        (HttpError("Invalid Credentials, 401"), "no valid credentials"),
        (OSError("Forbidden: https://storage.googleapis.com/b"), "permission denied"),
        (PermissionError(1, "Access Denied"), "permission denied"),
        (FileNotFoundError("b/no/o"), "there is no such bucket or object"),
        (ConnectionError("Cannot connect to host"), "the store cannot be reached"),
    ],
)
def test_what_a_store_answers_is_one_line(error, why):
    with pytest.raises(UserError, match=f"^gs://b/x: .*{why}"), explain_store_errors("gs://b/x"):
        raise error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionError("Cannot connect to host"), True),
        (HttpError("We encountered an internal error. Please try again., 503"), True),
        (OSError(errno.EBUSY, "Please reduce your request rate"), True),
        (HttpError("rate limit exceeded, 429"), True),
        (HttpError("Invalid argument, 400"), False),
        (OSError("Forbidden: https://storage.googleapis.com/b"), False),
    ],
)
def test_what_passes_by_itself_is_told_from_what_the_user_must_correct(error, passes):
    with pytest.raises(UserError) as found, explain_store_errors("gs://b/x"):
        raise error
    assert isinstance(found.value, Outage) == passes


def test_a_checkpoint_that_a_silent_store_did_not_take_is_told_from_a_damaged_one(tmp_path):
    silent = ValueError("UNAVAILABLE: Error writing gs://b/c/0: connection refused")
    told = "gs://b/c: the checkpoint could not be written"
    with pytest.raises(Outage, match=told), checkpoint_folders.telling_outage("gs://b/c"):
        raise silent
    for place, error in ((tmp_path, silent), ("gs://b/c", ValueError("DATA_LOSS: bad crc"))):
        with pytest.raises(ValueError, match=str(error)), checkpoint_folders.telling_outage(place):
            raise error


def test_faults_of_this_machine_are_not_blamed_on_the_store():
    with pytest.raises(OSError, match="No space left"), explain_store_errors("gs://b/x"):
        raise OSError(28, "No space left on device", "/tmp/x")
    with pytest.raises(OSError, match="No space left"), explain_store_errors("gs://b/x"):
        raise OSError(28, "No space left on device")  # of `write`, which names no file
    with pytest.raises(KeyError), explain_store_errors("gs://b/x"):
        raise KeyError("a fault of ours")


def test_another_version_of_orbax_is_refused_for_s3(monkeypatch):
    from orbax.checkpoint._src.serialization import tensorstore_utils

    monkeypatch.delattr(tensorstore_utils, "_use_gcs_driver")
    with pytest.raises(UserError, match="s3:// needs orbax-checkpoint in another version; run: "):
        checkpoint_folders._teach_orbax_s3.__wrapped__()


def test_a_store_out_of_reach_is_said_so(clouds):
    import s3fs

    fs = s3fs.S3FileSystem(
        endpoint_url=f"http://127.0.0.1:{free_port()}",
        config_kwargs={"retries": {"max_attempts": 0}},
    )
    with (
        pytest.raises(UserError, match="s3://b: the store cannot be reached"),
        explain_store_errors("s3://b"),
    ):
        fs.ls("b")


# --- launchers and mounts ------------------------------------------------------------------


def test_launchers_learn_the_extras_of_buckets():
    def needs(command, workdir, **changes):
        config = load_config(f"configs/{command}/tiny.py", changes)
        return needs_of(settings_of(command, config), workdir=workdir)

    data = {"model": "Org/Name", "data": "s3://b/a.jsonl,s3://b/c.jsonl"}
    assert {"gcs", "s3"} <= set(needs("sft", "gs://b/run", **data).extras)
    assert not {"gcs", "s3"} & set(needs("sft", "/runs", model="/m/n").extras)
    config = settings_of("rl", load_config("configs/rl/tiny.py", {"tasks": "aime:gs://b/x.jsonl"}))
    assert paths_of(config)["tasks"] == "gs://b/x.jsonl"


def test_a_check_looks_into_buckets(bucket):
    model = f"{bucket.replace('bucket', 'nobucket', 1)}/m"
    with pytest.raises(UserError, match=f"^{model}: .* bucket "):
        check._model(model)
    with pytest.raises(UserError, match="there is no bucket 'nobucket'"):
        check._writable(f"{bucket.replace('bucket', 'nobucket', 1)}/run")
    assert check._writable(f"{bucket}/run") == f"{bucket}/run can be written"


def test_a_check_looks_for_traces_in_buckets(bucket):
    put(f"{bucket}/run/traces.jsonl", "{}\n")
    for traces, found in (
        (f"{bucket}/run/traces.jsonl", True),
        (f"{bucket}/other/traces.jsonl", False),
        (f"{bucket.replace('bucket', 'nobucket', 1)}/traces.jsonl", False),
    ):
        config = build_config(RFTConfig, load_config("configs/rft/factbook.py", {"traces": traces}))
        lines = {each.name: (each.ok, each.text) for each in check._run(config)}
        assert lines["traces"][0] is found and traces in lines["traces"][1]


def test_a_run_in_a_bucket_is_watched_as_it_was_uploaded(bucket):
    place = f"{bucket}/run"
    for count in (1, 3):
        rows = [{"step": i, "phase": "rl", "reward/mean": 0.5} for i in range(1, count + 1)]
        put(f"{place}/metrics.jsonl", "".join(jsonl.dumps(row) + "\n" for row in rows))
        console = Console(file=io.StringIO(), width=100)
        console.print(watch.picture(watch.fetched(place), 8))
        text = console.file.getvalue()
        assert f"RL step {count}" in text and "reward/mean" in text


@pytest.mark.parametrize(
    ("kind", "folder", "bucket"),
    [
        ("fuse.gcsfuse lab", "/mnt/lab/runs", True),
        ("fuse.rclone lab:", "/mnt/lab", True),
        ("fuse.sshfs host:", "/mnt/lab/runs", False),
        ("ext4 /dev/sda", "/mnt/lab/runs", False),
        ("fuse.gcsfuse lab", "/mnt/other", False),
    ],
)
def test_mounted_buckets_are_told_from_other_folders(monkeypatch, kind, folder, bucket):
    lines = ["1 0 8:1 / / rw - ext4 /dev/root rw", f"2 1 0:9 / /mnt/lab rw,nosuid - {kind} rw"]
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *given, **named: (
            "\n".join(lines) if str(path) == "/proc/self/mountinfo" else read(path, *given, **named)
        ),
    )
    assert checkpoint_folders.is_bucket(Path(folder)) is bucket
