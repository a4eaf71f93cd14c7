"""The optimiser: AdamW with a learning rate that warms up and decays, and its settings."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated

from coa_jax.config.fields import Between, Bounded, Count, Natural, Positive, Share

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Bounded):
    """Settings of AdamW, with linear warm-up followed by cosine decay or a constant learning rate.

    Attributes:
        learning_rate: peak of the learning rate; -1 takes the default of the stage, see
            `defaults.completed`.
        total_steps: number of updates of the whole run; 0 takes the default of the stage.
        warmup_steps: number of updates until the learning rate reaches its peak.
        final_ratio: learning rate at the end of the run as a share of the peak. 1 keeps the
            learning rate constant after the warm-up.
        b1: decay of AdamW's first moment.
        b2: decay of AdamW's second moment.
        eps: AdamW's epsilon, which is added to the root of the second moment.
        weight_decay: factor of AdamW's weight decay, which applies to all parameters except the
            scales of norms and the biases.
        clip_norm: upper bound to which the global gradient norm is clipped; a large number such as
            1e9 turns clipping off.
        max_skipped: number of consecutive skipped updates (see `train_step`) after which training
            ends with an error.
    """

    learning_rate: Annotated[float, Between(0, 10, also=(-1,))] = -1.0
    total_steps: Natural = 0
    warmup_steps: Natural = 0
    final_ratio: Share = 0.0
    b1: Annotated[float, Between(0, 1, below=True)] = 0.9
    b2: Annotated[float, Between(0, 1, below=True)] = 0.95
    eps: Annotated[float, Between(1e-30, 1)] = 1e-8
    weight_decay: Annotated[float, Between(0, 10)] = 0.01
    clip_norm: Positive = 1.0
    max_skipped: Count = 5


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


@functools.lru_cache
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Creates the optimiser of a run from its settings."""
    import jax
    import optax

    decays = functools.partial(
        jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key not in ("scale", "bias")
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )
