"""The policy: the decoder, its weights and tokenizer, and their file formats.

`decoder` defines the modules, `ops` the operations, `api` loads and saves whole models, and
`tokenizer` and `encode` turn text into tokens. The room imports `parallel`, `protocol`, `storage`
and rooms below these, and knows neither engine nor tools.
"""

from __future__ import annotations

import importlib.metadata
import os

# On CPUs, XLA 0.12 uses YNNPACK for fusions, which sums in an order that depends on the number of
# rows.  The flag turns these fusions off.  XLA reads it when JAX starts its backend, and stops at a
# flag that it does not know: so it is set here, before the first array, for tested versions only.
_YNN = "--xla_cpu_experimental_ynn_fusion_type"
_flags = os.environ.get("XLA_FLAGS", "")
if importlib.metadata.version("jaxlib").startswith("0.12.") and _YNN not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} {_YNN}=".strip()
