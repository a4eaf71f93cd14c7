"""Gives access to files in buckets (``gs://``, ``s3://``) and to models of the Hub, by URL.

The other packages work with local paths. `local` and `model_folder` copy an input to a local path.
`output` uploads a local file or folder at the end. `run_folder` creates a local mirror of a run
directory, which `run.run_dir` opens. `SharedCache` is a cache to which several processes write.
docs/storage.md describes when files are uploaded. The room imports `files` and `config` only.
"""

from coa_jax.storage.copies import (
    cache_folder,
    exists,
    local,
    output,
    upload,
    version,
    with_urls,
)
from coa_jax.storage.file_systems import SCHEMES, check_reachable, check_writable, is_url, join
from coa_jax.storage.hub import (
    cached_files,
    check_push,
    hub_cache,
    hub_description,
    hub_files,
    hub_id,
    model_folder,
    push_model,
    snapshot_of,
    weights_apart,
    weights_on_hub,
)
from coa_jax.storage.mirror import Mirror, mirror_of, run_folder, visited
from coa_jax.storage.origin import (
    FETCHED,
    Origin,
    local_copy,
    origin_of,
    read_header,
    with_header,
)
from coa_jax.storage.shared import SharedCache, closing_caches

__all__ = [
    "FETCHED",
    "SCHEMES",
    "Mirror",
    "Origin",
    "SharedCache",
    "cache_folder",
    "cached_files",
    "check_push",
    "check_reachable",
    "check_writable",
    "closing_caches",
    "exists",
    "hub_cache",
    "hub_description",
    "hub_files",
    "hub_id",
    "is_url",
    "join",
    "local",
    "local_copy",
    "mirror_of",
    "model_folder",
    "origin_of",
    "output",
    "push_model",
    "read_header",
    "run_folder",
    "snapshot_of",
    "upload",
    "version",
    "visited",
    "weights_apart",
    "weights_on_hub",
    "with_header",
    "with_urls",
]
