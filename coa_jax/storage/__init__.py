"""Files and folders by URL: local paths, buckets (``gs://``, ``s3://``) and models of the Hub.

Everything below works with local paths.  An input is copied first (`local`, `model_folder`), an
output is uploaded in the end (`output`), and the directory of a run has a local mirror
(`run_folder`, which `coa_jax.run_dir` opens).  docs/storage.md says what is written when.
"""

from coa_jax.storage.copies import exists, local, output, shown, upload, version
from coa_jax.storage.hub import (
    RemoteFiles,
    check_push,
    hub_id,
    model_folder,
    push_model,
    weights_apart,
)
from coa_jax.storage.mirror import Mirror, mirror_of, run_folder, visited
from coa_jax.storage.places import SCHEMES, check, check_writable, is_url, join, scheme_of

__all__ = [
    "SCHEMES",
    "Mirror",
    "RemoteFiles",
    "check",
    "check_push",
    "check_writable",
    "exists",
    "hub_id",
    "is_url",
    "join",
    "local",
    "mirror_of",
    "model_folder",
    "output",
    "push_model",
    "run_folder",
    "scheme_of",
    "shown",
    "upload",
    "version",
    "visited",
    "weights_apart",
]
