"""A release from a run in a bucket to a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from coa_jax import storage
from coa_jax.errors import UserError
from coa_jax.paper.release import release_to
from tests.released import unreleased


@pytest.mark.slow
def test_a_run_in_a_bucket_is_released_to_a_bucket(bucket, tmp_path):
    run = tmp_path / "run"
    unreleased(run)
    storage.upload(run, f"{bucket}/run")
    release_to(f"{bucket}/run", f"{bucket}/released")
    assert storage.exists(f"{bucket}/released/adapter/adapter_model.safetensors")
    text = Path(storage.local(f"{bucket}/released/README.md")).read_text()
    assert "coa-jax report --workdir=FOLDER" in text
    with pytest.raises(UserError, match=f"^--output={bucket}/released "):
        release_to(f"{bucket}/run", f"{bucket}/released")
