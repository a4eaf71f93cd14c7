"""The optimiser: AdamW or any optax optimiser, with a learning rate that warms up and decays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from coa_jax.config.extensions import (
    BoundFunction,
    ExtensionKind,
    Named,
    Reference,
    bind,
    explain_errors_of,
)
from coa_jax.config.fields import Between, Bounded, Natural, Positive, Share, format_value
from coa_jax.config.overrides import suggest
from coa_jax.errors import UserError, UserErrors

if TYPE_CHECKING:
    import optax

OPTIMIZERS = ExtensionKind(
    "optimiser",
    "coa_jax.optimizers",
    {},
    offers=("learning_rate", "weight_decay", "mask", "weight_decay_mask"),
)
"""Functions that return an `optax.GradientTransformation`, such as ``optax:lion``.

``learning_rate`` is the schedule of the run. ``mask`` and ``weight_decay_mask`` are a function that
selects the parameters to which weight decay applies.
"""


@dataclasses.dataclass(frozen=True)
class AdamConfig(Bounded):
    """Options of AdamW.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: epsilon, which is added to the root of the second moment.
    """

    b1: Annotated[float, Between(0, 1, below=True)] = 0.9
    b2: Annotated[float, Between(0, 1, below=True)] = 0.95
    eps: Annotated[float, Between(1e-30, 1)] = 1e-8


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Bounded):
    """Settings of the optimiser, with linear warm-up, then cosine decay or a constant rate.

    Attributes:
        learning_rate: peak of the learning rate; -1 chooses by stage and adapters, see
            `defaults.completed`.
        total_steps: number of updates; 0 for 100 steps of RL, or 3 passes in other runs.
        warmup_steps: number of updates until the learning rate reaches its peak.
        final_ratio: learning rate at the end of the run as a share of the peak. 1 keeps the
            learning rate constant after the warm-up.
        weight_decay: factor of the weight decay, which applies to all parameters except the scales
            of norms and the biases.
        clip_norm: upper bound to which the global gradient norm is clipped before the optimiser
            sees the gradient; a large number such as 1e9 turns clipping off.
        path: path of a function that takes the place of AdamW, such as ``optax:lion``, see
            `OPTIMIZERS`; "" for AdamW with ``b2=0.95``.
        options: keyword arguments of this function, or of AdamW: ``b1``, ``b2`` and ``eps``.
    """

    learning_rate: Annotated[float, Between(0, 10, also=(-1,))] = -1.0
    total_steps: Natural = 0
    warmup_steps: Natural = 0
    final_ratio: Share = 0.0
    weight_decay: Annotated[float, Between(0, 10)] = 0.01
    clip_norm: Positive = 1.0
    path: Annotated[str, Named(OPTIMIZERS, "")] = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = None if self.path else self.adam  # checks the options

    @property
    def adam(self) -> AdamConfig:
        """Options of AdamW, which is the optimiser if ``path`` is ""."""
        names = [field.name for field in dataclasses.fields(AdamConfig)]
        for name in self.options:
            if name not in names:
                raise UserError(f"options.{name} is no option of AdamW{suggest(str(name), names)}")
        try:
            return AdamConfig(**self.options)
        except UserErrors as error:
            raise error.within("options") from None


Optimizer: TypeAlias = "OptimizerConfig | optax.GradientTransformation"
"""An optimiser: its settings, or an optax object, which is used as it is."""


@functools.lru_cache
def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates.

    Linear warm-up is followed by cosine decay to ``final_ratio`` times the peak.
    """
    import optax

    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.total_steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def schedule_of(optimizer: Optimizer) -> optax.Schedule | None:
    """Returns the schedule of the settings; None if the optimiser brings a schedule of its own."""
    if not isinstance(optimizer, OptimizerConfig):
        return None
    if optimizer.path and "learning_rate" not in _call(optimizer).asks:
        return None
    return schedule(optimizer)


def make_optimizer(optimizer: Optimizer) -> optax.GradientTransformation:
    """Creates the optimiser of a run from its settings.

    Equal settings give the same object, so that they share a compiled training step. An optax
    object is returned unchanged.

    Raises:
        UserError: the function that ``path`` names cannot be called with the options, or does not
            return an optax optimiser.
    """
    if not isinstance(optimizer, OptimizerConfig):
        return optimizer
    return _made(optimizer, getattr(optimizer.path, "target", None))


@functools.lru_cache
def _made(config: OptimizerConfig, _target: Callable[..., Any] | None) -> Any:
    """Creates an optimiser; two functions of Python may have the same name in the settings."""
    import jax
    import optax

    decays = functools.partial(
        jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key not in ("scale", "bias")
    )
    offered = {"learning_rate": schedule(config), "weight_decay": config.weight_decay}
    if config.path:
        call = _call(config)
        with explain_errors_of(call, config.path, _WHERE):
            chosen = call(**offered, mask=decays, weight_decay_mask=decays)
        _check(chosen, f"{_WHERE}: {config.path} returned")
    else:
        chosen = optax.adamw(**offered, **dataclasses.asdict(config.adam), mask=decays)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), chosen)


_WHERE = "optimizer.path"


def _call(config: OptimizerConfig) -> BoundFunction:
    return bind(OPTIMIZERS, config.path, config.options, _WHERE)


def reference_to(optimizer: Any) -> Reference:
    """Wraps an optax object so that the setting `OptimizerConfig.path` can hold it.

    The result is a string, the object's name in the settings, which also carries the object.

    Raises:
        UserError: the object is no optax optimiser.
    """
    _check(optimizer, "optimizer is")
    return Reference(lambda: optimizer, "optimizer")


def _check(optimizer: Any, what: str) -> None:
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise UserError(
            f"{what} {format_value(optimizer)}, which is no optax GradientTransformation"
        )
