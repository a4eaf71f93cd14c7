"""SFT of a user's own Flax NNX module, see `model.foreign.Foreign`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coa_jax.errors import UserError
from coa_jax.model.foreign import Foreign
from coa_jax.model.params import Params
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks.prompts import load_prompt
from coa_jax.train import data
from coa_jax.train.batch import Batch, Example
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.config import SFTConfig
from coa_jax.train.defaults import open_sizes
from coa_jax.train.fit import make_updates
from coa_jax.train.lengths import fitting, read_parts
from coa_jax.train.logps import log_probs
from coa_jax.train.loop import Loop, Trained
from coa_jax.train.losses import Net
from coa_jax.train.objectives import Stats
from coa_jax.train.step import abstract_state, init_state
from coa_jax.train.stop import end_run


@dataclasses.dataclass(frozen=True)
class ModuleLoss:
    """Negative log-likelihood of the policy's tokens under a module, see `losses.SFTLoss`.

    Attributes:
        graph: the module without its arrays.
    """

    graph: Any

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[Any, Stats]:
        """Computes the loss of a micro-batch; ``net.frozen`` is the module's untrained state."""
        module = nnx.merge(self.graph, params, *([net.frozen] if net.frozen else []))
        logps = log_probs(lambda tokens, *_: module(tokens), batch)
        loss = -(logps * batch.mask).sum()
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Unpacked(data.UpdateSequence):
    """Successive updates in which each example has its own row."""

    examples: data.Examples

    def make_update(self, positions: range) -> data.Update:
        """Creates the update whose examples are at the given positions of the stream."""
        indices = [int(self.order[position]) for position in positions]

        def chosen(number: int) -> Example:
            return self.examples[indices[number]]

        layout = [[number] for number in range(len(indices))]
        own = range(self.rows)
        return data.Update(
            list(data.MicroBatches(layout, chosen, self.rows, self.length, own)),
            self.rows,
            [int(self.examples.sizes[index]) for index in indices],
            float(self.examples.losses[np.array(indices)].sum()),
            positions.stop,
        )


def train(policy: Foreign, config: SFTConfig, run: RunDir, output: Path) -> None:
    """Trains the parameters of a module on records, and writes them to ``output``.

    The module itself has the trained parameters afterwards. An interrupted run resumes from its
    newest checkpoint.

    Raises:
        UserError: a setting needs a model of this package, or the module has dropout.
    """
    _refuse(config, policy.module)
    prompt = load_prompt(config.prompt_style)
    readers, counts = read_parts(config, policy.tokenizer, prompt, config.parts)
    longest = max(int(each.sizes.max(initial=1)) for each in counts)
    length = config.row_length or longest
    parts = [fitting(*read, length) for read in zip(readers, counts, strict=True)]
    examples = data.join(parts)
    config = open_sizes(config, longest, len(examples))
    parted: tuple[Any, ...] = nnx.split(policy.module, nnx.Param, ...)
    graph, params, rest = parted
    # Updates donate their parameters, and the module must stay whole if the run is interrupted.
    start = jax.tree.map(jnp.copy, nnx.to_pure_dict(params))
    frozen = nnx.to_pure_dict(rest)
    checkpoints = Checkpoints(
        run.checkpoints / "sft", config.keep_last, config.keep_best, before_save=run.sync
    )
    trained = Trained(policy, None, checkpoints, 0, config.optimizer.total_steps, {"cursor": 0})  # type: ignore[arg-type]
    restored = checkpoints.newest(abstract_state(start, config.optimizer, frozen))
    if restored is None:
        trained.state = init_state(start, config.optimizer, frozen)
    else:
        trained.state, trained.step = restored.state, restored.step
        trained.extra = restored.extra
    run.begin("sft", trained.step, trained.total)
    updates = Unpacked(
        examples=examples,
        order=data.shuffled([*map(len, parts)], config.weights or (1.0,), config.seed),
        batch_size=config.batch_size,
        rows=config.rows,
        length=config.row_length,
        cursor=trained.extra["cursor"],
        number=trained.total - trained.step,
    )
    loop = Loop(
        config=config,
        run=run,
        phase="sft",
        trained=trained,
        parts=("data", "update", "checkpoint"),
        shown={"loss": "loss"},
    )
    make_updates(
        loop,
        config,
        updates,
        loss=ModuleLoss(graph),
        model_config=None,  # type: ignore[arg-type]
        epoch=len(examples),
    )
    if trained.step < trained.total:
        end_run(trained.step, trained.total)
    nnx.replace_by_pure_dict(params, trained.state.params)
    nnx.update(policy.module, params)
    policy.save(output)


def _refuse(config: SFTConfig, module: Any) -> None:
    wrong: dict[str, Any] = {"lora.rank": config.lora.rank, "evaluate_every": config.evaluate_every}
    wrong |= {"rename_share": config.rename_share, "validation": config.validation}
    for name, value in wrong.items():
        if value:
            raise UserError(
                f"{name} is {value!r}: it needs a model of coa_jax; all parameters of a module of "
                "your own are trained, without rollouts. Leave the setting out"
            )
    for axis in ("data", "fsdp", "tensor"):
        if (size := getattr(config.mesh, axis)) > 1:
            raise UserError(
                f"mesh.{axis} is {size}: a module of your own has no logical axes, so it trains on "
                "one device. Leave the setting out, or train a model of coa_jax"
            )
    # Updates do not change the state of random numbers.
    for path, part in nnx.iter_graph(module):
        if not isinstance(part, nnx.Dropout | nnx.MultiHeadAttention) or part.deterministic:
            continue
        if part.rate if isinstance(part, nnx.Dropout) else part.dropout_rate:
            raise UserError(
                f"{'.'.join(('module', *map(str, path)))} has dropout, which would drop the same "
                "values in every update: turn it off by module.eval()"
            )
