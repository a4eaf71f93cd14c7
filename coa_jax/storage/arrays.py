"""Prepares folders for Orbax's checkpoints: local folders, mounted buckets, buckets by URL."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from coa_jax.storage.mirror import CHECKPOINTS, mirror_of
from coa_jax.storage.places import file_system, is_url, join, scheme_of

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
    found: Path = prepared(join(mirror.url, *path.relative_to(mirror.path).parts, CHECKPOINTS))
    return found


def prepared(place: str | os.PathLike[str]) -> Any:
    """Converts a path or URL to the form that Orbax needs.

    A local path becomes a `pathlib.Path`, and a URL an `epath.Path`.
    """
    if not is_url(place):
        return Path(place).resolve()
    file_system(scheme_of(os.fspath(place)))  # applies settings of fsspec that epath uses, too
    if scheme_of(os.fspath(place)) == "s3":
        _teach_orbax_s3()
    from etils import epath

    return epath.Path(place)


def is_bucket(path: os.PathLike[str]) -> bool:
    """Returns whether a folder, given by URL or mounted, is in a bucket.

    In a bucket, renames are not atomic.
    """
    if is_url(path):
        return True
    kinds = {}
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        left, _, right = line.partition(" - ")
        kinds[left.split()[4]] = right.split()[:2]
    folder = Path(path).resolve()
    found = next((kinds[str(p)] for p in (folder, *folder.parents) if str(p) in kinds), ["", ""])
    return found[0].startswith("fuse") and any(name in " ".join(found) for name in MOUNTS)


@functools.cache
def _teach_orbax_s3() -> None:
    """Patches Orbax to use TensorStore's driver for ``s3://``.

    Orbax writes metadata to any URL that etils.epath supports. For arrays it uses only
    TensorStore's drivers for local files and for Google Cloud Storage. The three patched functions
    choose the driver.
    """
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    normalised, google = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs

    def driver(path: str) -> dict[str, Any]:
        return _s3_driver(path) if path.startswith("s3://") else google(path)

    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(("gs://", "s3://"))
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
