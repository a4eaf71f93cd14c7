"""How a model is computed, as one static value that replaces many arguments.

A `Compute` is hashable, so compiled functions take it as a static argument. `ModelConfig` describes
the architecture separately. Parameters and tree definitions contain neither a `Compute` nor a
`ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coa_jax.config.fields import OneOf, check
from coa_jax.model.attention.choice import Case, platform_of, resolve
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.compilation_cache import log_compilations
from coa_jax.parallel.mesh import sharding_for

Collectives = Literal["none", "compiler", "manual"]
"""The possible values of `Compute.collectives`."""

BACKEND_VARIABLE = "COA_JAX_OPS"
"""Name of the environment variable that overrides the backend that the platform selects."""

BACKENDS = {
    "reference": "coa_jax.model.ops",
    "cpu": "coa_jax.model.ops_cpu",
    "tpu": "coa_jax.model.ops_tpu",
}
"""Maps the name of a backend to the module with its operations."""

KernelLayout = Literal["inputs_first", "outputs_first", "matrices"]
"""The order of a weight matrix's axes: the input axes I, and the output axes O, o (o is the last).

==================  ===============  ===========================================================
name                axes             use
==================  ===============  ===========================================================
``inputs_first``    ``[*I, *O, o]``  training on all platforms, and decoding on GPUs
``outputs_first``   ``[*O, o, *I]``  decoding on one CPU device, see `ops_cpu`
``matrices``        ``[*O, *I, o]``  decoding on TPUs. If O has axes, the TPU compiler copies the
                                     kernels of the other layouts into this layout, in each
                                     decoding program
==================  ===============  ===========================================================
"""


@dataclasses.dataclass(frozen=True)
class Compute:
    """The static choices of a forward or backward pass.

    Attributes:
        dtype: dtype of matmul operands. Matmuls accumulate in float32.
        remat: name of a rematerialisation policy, which says which activations are recomputed, see
            `model.remat`.
        attention: name of an attention implementation. ``auto`` is not allowed here, because
            `attention.choice.resolve` must already have chosen an implementation.
        backend: name of the backend, a key of `BACKENDS`, see `backend_for`.
        mesh: devices over which arrays are sharded; None for a single device.
        collectives: how the matmuls of a layer are sharded over a mesh. ``compiler`` states
            shardings and lets XLA place the collectives. ``manual`` writes the collectives
            explicitly, see `model.collectives`. ``none``, for decoding, states no shardings; XLA
            derives them from the parameters and the cache.
        kernels: order of the axes of weight matrices (Flax's kernels), see `KernelLayout`.
        interpret: whether the attention programs of GPUs and TPUs are emulated on a CPU, for tests.
            Pallas programs then run in interpret mode, and cuDNN, tokamax and ``ragged_paged`` are
            replaced by reference functions of their libraries.
    """

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"
    backend: str = "reference"
    mesh: Mesh | None = None
    collectives: Collectives = "compiler"
    kernels: KernelLayout = "inputs_first"
    interpret: bool = False

    @property
    def ops(self) -> Any:
        """The module that implements the operations of `model.ops` for this backend."""
        return importlib.import_module(BACKENDS[self.backend])

    @property
    def one_device(self) -> bool:
        """Whether the computation uses a single device, so that nothing is sharded."""
        return self.mesh is None or self.mesh.size == 1

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains the sharding of an array in a training step.

        Args:
            x: the array. Without a mesh, it is returned unchanged.
            *axes: logical name of each axis, which the sharding rules map to mesh axes; None for an
                axis that is not sharded.
        """
        if self.mesh is None or self.collectives == "none":
            return x
        return jax.lax.with_sharding_constraint(x, sharding_for(self.mesh, axes, shape=x.shape))


REFERENCE = Compute()
"""The computation in float32 on one device, with the operations of `model.ops`."""


def backend_for(platform: str) -> str:
    """Returns the backend for a platform such as ``cpu``, ``cuda`` or ``tpu``.

    Raises:
        UserError: the value of the environment variable `BACKEND_VARIABLE` is not a backend.
    """
    if backend := os.environ.get(BACKEND_VARIABLE):
        return check(backend, Annotated[str, OneOf(*BACKENDS)], BACKEND_VARIABLE)
    return platform if platform in BACKENDS else "reference"


def collectives_for(platform: str, setting: str) -> Collectives:
    """Returns the strategy for collectives that a setting selects, see `model.collectives`.

    The setting is ``compiler``, ``manual`` or ``auto``. ``auto`` selects ``manual`` on
    TPUs and ``compiler`` on other platforms.

    On TPUs, ``manual`` leads to a better schedule: a fine-tuning step of a 32B model on v5p:4x4x8
    takes 70.6 s with ``manual`` and 77.1 s with ``compiler`` (docs/lab_notes.md).
    """
    if setting == "auto":
        return "manual" if platform == "tpu" else "compiler"
    return "manual" if setting == "manual" else "compiler"


def local_compute(dtype: str = "float32", **choices: Any) -> Compute:
    """Returns a `Compute` for the first device of this process, without a mesh.

    Args:
        dtype: dtype of matmul operands.
        **choices: values of further fields of `Compute`, by name.
    """
    platform, _ = platform_of(jax.local_devices()[0])
    log_compilations()
    return Compute(jnp.dtype(dtype).name, backend=backend_for(platform), **choices)


def training_compute(
    model_config: ModelConfig,
    *,
    dtype: str,
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
    collectives: str = "auto",
) -> Compute:
    """Resolves the settings of a training run for the devices that the run uses.

    Args:
        model_config: the architecture.
        dtype, remat, mesh: fields of `Compute`.
        attention: ``auto`` or the name of an implementation of causal attention.
        collectives: ``auto``, ``compiler`` or ``manual``, see `collectives_for`.

    Raises:
        UserError: the implementation of attention is unknown, or cannot run on these devices.
    """
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    platform, capability = platform_of(device)
    name = jnp.dtype(dtype).name
    heads = model_config.num_kv_heads, model_config.num_groups, model_config.head_dim
    windowed = model_config.local is not None
    case = Case(platform, name, *heads, capability=capability, windowed=windowed)
    implementation = resolve("causal", attention, case, "config.attention")
    placed = collectives_for(platform, collectives)
    log_compilations()
    return Compute(name, remat, implementation, backend_for(platform), mesh, placed)
