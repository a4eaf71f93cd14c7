"""Where Orbax puts checkpoints: local folders, mounted buckets, and buckets by URL."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from coa_jax.storage.mirror import CHECKPOINTS, mirror_of
from coa_jax.storage.places import file_system, is_url, join, scheme_of

MOUNTS = ("gcsfuse", "s3fs", "goofys", "mountpoint-s3", "rclone", "blobfuse")
"""What mounts buckets as folders, as it names itself in the table of mounts."""


def checkpoints_of(path: Path) -> Path:
    """Where a run's checkpoints are: in its bucket where its directory has a mirror.

    Args:
        path: local folder of the run.
    """
    mirror = mirror_of(path)
    if mirror is None:
        return path / CHECKPOINTS
    found: Path = prepared(join(mirror.url, *path.relative_to(mirror.path).parts, CHECKPOINTS))
    return found


def prepared(place: str | os.PathLike[str]) -> Any:
    """The folder as Orbax takes it; a `pathlib.Path`, or an `epath.Path` for a URL."""
    if not is_url(place):
        return Path(place).resolve()
    file_system(scheme_of(os.fspath(place)))  # sets what the file systems of epath take over
    if scheme_of(os.fspath(place)) == "s3":
        _teach_orbax_s3()
    from etils import epath

    return epath.Path(place)


def is_bucket(path: os.PathLike[str]) -> bool:
    """Whether a folder is in a bucket, by URL or mounted: its renames are not atomic there."""
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
    """Lets Orbax hand ``s3://`` to TensorStore, which has a driver for it.

    Orbax writes metadata to any URL of etils.epath but knows the drivers of local files and Google
    Cloud Storage only.  These three functions are where it chooses the driver.
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
    """TensorStore's description of a folder on S3, or of a store that speaks its protocol."""
    bucket, _, inside = path.removeprefix("s3://").partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": inside}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # Or it complains about each file of credentials that is not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec
