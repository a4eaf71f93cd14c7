"""Prepares folders for Orbax's checkpoints: local folders, mounted buckets, buckets by URL."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa_jax.config import installed
from coa_jax.errors import Outage
from coa_jax.storage.file_systems import file_system, is_url, join, scheme_of
from coa_jax.storage.mirror import CHECKPOINTS, mirror_of

MOUNTS = ("gcsfuse", "s3fs", "goofys", "mountpoint-s3", "rclone", "blobfuse")
"""Names of programs that mount buckets as folders, as ``/proc/self/mountinfo`` shows them."""


def checkpoints_of(path: Path) -> Path:
    """Returns the folder of a run's checkpoints.

    Args:
        path: local folder of the run. If this folder mirrors a folder in a bucket, the function
            returns the folder of the checkpoints in the bucket.
    """
    mirror = mirror_of(path)
    if mirror is None:
        return path / CHECKPOINTS
    folder: Path = prepared(join(mirror.url, *path.relative_to(mirror.path).parts, CHECKPOINTS))
    return folder


def prepared(path: str | os.PathLike[str]) -> Any:
    """Converts a path or URL to the form that Orbax needs.

    A local path becomes a `pathlib.Path`, and a URL an `epath.Path`.
    """
    if not is_url(path):
        return Path(path).resolve()
    file_system(scheme_of(os.fspath(path)))  # applies settings of fsspec that epath uses, too
    if scheme_of(os.fspath(path)) == "s3":
        _teach_orbax_s3()
    from etils import epath

    return epath.Path(path)


def is_bucket(path: os.PathLike[str]) -> bool:
    """Returns whether a folder is in a bucket: given by its URL, or mounted by one of `MOUNTS`.

    A bucket cannot rename atomically, so a finished checkpoint needs a marker file there.
    """
    if is_url(path):
        return True
    kinds = {}
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        mount, _, right = line.partition(" - ")
        kinds[mount.split()[4]] = right.split()[:2]
    folder = Path(path).resolve()
    kind = next((kinds[str(p)] for p in (folder, *folder.parents) if str(p) in kinds), ["", ""])
    return kind[0].startswith("fuse") and any(name in " ".join(kind) for name in MOUNTS)


_UNREACHED = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Status codes in error messages of TensorStore for a store that does not answer."""

_LACKING = (*_UNREACHED, "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
"""Status codes in error messages of TensorStore whose cause is not a damaged file."""


def is_outage(error: Exception) -> bool:
    """Returns whether an error of Orbax or TensorStore shows that a store does not answer."""
    return any(state in str(error) for state in _UNREACHED)


def is_passing(error: Exception) -> bool:
    """Returns whether a read error may have another cause than a damaged file.

    Such causes are a store that does not answer, missing permissions, and exhausted resources.
    """
    absent = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    refused = isinstance(error, OSError) and not isinstance(error, absent)
    return refused or any(state in str(error) for state in _LACKING)


@contextlib.contextmanager
def telling_outage(folder: os.PathLike[str]) -> Iterator[None]:
    """Converts errors of writing a checkpoint to `Outage` if the store does not answer.

    Raises:
        Outage: the folder is in a bucket, which did not answer for several minutes.
    """
    try:
        yield
    except Exception as error:
        if not (is_bucket(folder) and is_outage(error)):
            raise
        reason = " ".join(str(error).split())[:160]
        raise Outage(
            f"{folder}: the checkpoint could not be written ({reason}); run the same "
            "command again to continue from the checkpoint before it"
        ) from error


@functools.cache
def _teach_orbax_s3() -> None:
    """Patches Orbax to use TensorStore's driver for ``s3://``.

    Orbax writes metadata to any URL that etils.epath supports. For arrays it uses only
    TensorStore's drivers for local files and for Google Cloud Storage. The three patched functions
    choose the driver.

    Raises:
        UserError: the installed version of Orbax does not have these functions.
    """
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    try:
        chosen = tensorstore_utils._use_gcs_driver
        normalised, google = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
    except AttributeError as error:
        raise installed.missing("s3://", "orbax-checkpoint in another version", "s3") from error

    def driver(path: str) -> dict[str, Any]:
        return _s3_driver(path) if path.startswith("s3://") else google(path)

    tensorstore_utils._use_gcs_driver = lambda path: path.startswith("s3://") or chosen(path)
    tensorstore_utils._normalize_path = lambda path: normalised(path).replace("s3:/", "s3://")
    gcs_utils.get_kvstore_for_gcs = driver


def _s3_driver(path: str) -> dict[str, Any]:
    """Returns TensorStore's spec of a folder on S3, or on a store with the protocol of S3."""
    bucket, _, inside = path.removeprefix("s3://").partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": inside}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # Without this setting, TensorStore logs a warning for each missing file of credentials.
        spec["aws_credentials"] = {"type": "environment"}
    return spec
