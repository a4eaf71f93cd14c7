"""Compares updates on a mesh of eight simulated devices with updates on one device.

python -m tests.train.sharded_updates MODEL KIND,DATA,FSDP,TENSOR,COLLECTIVES ...

MODEL is of the architecture `CONFIG`.  Each case prints its own name when all agree.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from coa_jax.config.extensions import importable
from coa_jax.data.trajectory import Author, Reward, Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.model.api import load_model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import (
    Params,
    merge_adapters,
    select,
    shardings,
    split_trained,
)
from coa_jax.parallel.mesh import make_mesh, sharding_for
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import pack, split_rows
from coa_jax.train.examples import trajectory_example
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import TrainState, init_state, train_step
from coa_jax.train.update import critic_state, reference_params, update
from tests.train.bare import bare
from tests.train.tiny_runs import rl_config

importable(Path(__file__).parents[2] / "examples" / "own_algorithm")

# Two key/value heads: two devices split them, eight cannot.
CONFIG = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16, qkv_bias=True)
LENGTH, STEPS = 40, 3
LORA = LoraConfig(rank=4, alpha=32.0)
# With so large an eps an update is nearly linear in the gradient: what is compared is the gradient.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.3,
    total_steps=99,
    final_ratio=1.0,
    options={"eps": 1.0},
    weight_decay=0.0,
    clip_norm=1e9,
)
PPO = Algorithm("ppo", kl="k1", kl_in="reward", kl_coef=0.1, lam=0.9, critic_learning_rate=0.3)
KINDS: dict[str, dict[str, Any]] = {
    # A critic, and a reference, whose divergence is part of the rewards.
    "ppo": {"algorithm": PPO},
    # The reference is the model without its adapters; the critic has none.
    "ppo-lora": {"algorithm": PPO, "lora": LORA},
    "kl": {"algorithm": Algorithm("grpo", kl_coef=0.3)},
    "kl-lora": {"algorithm": Algorithm("grpo", kl_coef=0.3), "lora": LORA},
    # Old log-probabilities by the trainer, which several updates need.
    "recomputed": {
        "algorithm": Algorithm("dapo", old_logp="trainer", tis_cap=1.5),
        "mini_batch": 2,
    },
    # An advantage and a loss outside of the package.
    "own": {
        "algorithm": Algorithm(
            "grpo", "maxrl:maxrl", loss="sapo:sapo", loss_options={"tau_neg": 2.0}
        ),
        "mini_batch": 2,
    },
    "sft-lora": {"lora": LORA},
}


def config_of(kind: str) -> RLConfig:
    return rl_config(
        Path("unused"),
        Path("unused"),
        **{
            "groups": 4,
            "rows": 8,
            "row_length": LENGTH,
            "rollout": RolloutConfig(LENGTH, 3, 16),
            "engine": EngineConfig(4, LENGTH, 8, (32,)),
            "optimizer": OPTIMIZER,
            **KINDS[kind],
        },
    )


def trajectories() -> list[list[Trajectory]]:
    """Four groups of four, half of them right and one not graded; more rows than a mesh has."""
    rng = np.random.default_rng(7)

    def one(task: int, sample: int) -> Trajectory:
        size = int(rng.integers(18, LENGTH))
        author = rng.choice([Author.POLICY, Author.ENVIRONMENT], size, p=[0.7, 0.3])
        author[:2], author[2] = Author.PROMPT, Author.POLICY
        return bare(
            rng.integers(0, 384, size),
            author,
            task_id=f"t{task}",
            sample_id=sample,
            logp=np.where(author == Author.POLICY, rng.normal(-6, 0.3, size), 0),
            reward=Reward(None if (task, sample) == (2, 3) else float(sample % 2)),
        )

    return [[one(task, sample) for sample in range(4)] for task in range(4)]


def run(
    path: str, kind: str, mesh: Mesh | None, collectives: str = "compiler"
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Statistics of a few steps; and arrays by name, each with how much it changed."""
    config, groups = config_of(kind), trajectories()
    compute = local_compute(mesh=mesh, collectives=collectives)
    loaded = load_model(path, mesh=mesh)
    model = dataclasses.replace(loaded.config, lora=config.lora)
    critic = critic_state(config, loaded.params)
    reference = reference_params(config, loaded.params)
    params, frozen = split_trained(loaded.params, model, seed=5, mesh=mesh)
    if frozen:
        params = begun(params)
    states = {"policy": init_state(params, config.optimizer, frozen)}
    if critic is not None:
        states["critic"] = critic
    before = {name: jax.tree.map(np.array, state.params) for name, state in states.items()}
    kept = jax.tree.map(np.array, frozen)
    history = []
    for _ in range(STEPS):
        if kind.startswith("sft"):
            examples = [trajectory_example(t, 0.0) for group in groups for t in group]
            states["policy"], stats = train_step(
                states["policy"],
                split_rows(pack(examples, LENGTH), config.rows),
                loss=SFTLoss(),
                model_config=model,
                compute=compute,
                optimizer=config.optimizer,
            )
        else:
            states["policy"], critic, stats = update(
                config,
                states["policy"],
                model,
                groups,
                compute,
                critic=states.get("critic"),
                reference=reference,
            )
            if critic is not None:
                states["critic"] = critic
        history.append(stats)
    if mesh is not None:
        check_places(mesh, model, states, reference)
    after = {name: state.params for name, state in states.items()}
    if frozen:
        jax.tree.map(np.testing.assert_array_equal, states["policy"].frozen, kept)
        before["merged"] = kept
        after["merged"] = merge_adapters(model, states["policy"].model)
    return history, {
        jax.tree_util.keystr(at): (np.asarray(new), np.asarray(new) - np.asarray(old))
        for (at, old), new in zip(
            jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(after), strict=True
        )
    }


def begun(adapters: Params) -> Params:
    """Adapters whose second part is not zero any more, so that the first part learns."""
    rng = np.random.default_rng(3)

    def one(b: jax.Array) -> jax.Array:
        return jax.device_put(rng.normal(0, 0.02, b.shape).astype(np.float32), b.sharding)

    return unflatten_dict(
        {path: one(x) if path[-1] == "b" else x for path, x in flatten_dict(adapters).items()}
    )


def check_places(
    mesh: Mesh, model: ModelConfig, states: dict[str, TrainState], reference: Params | None
) -> None:
    """Every array lies where the rules of training want it, and so do its moments."""

    def check(tree: Params, places: Params) -> None:
        def same(x: jax.Array, place: Any) -> None:
            assert x.sharding.is_equivalent_to(place, x.ndim), (x.shape, x.sharding, place)

        jax.tree.map(same, tree, places)

    whole, frozen = shardings(CONFIG, mesh), states["policy"].frozen
    everywhere = sharding_for(mesh, (None,))
    places = {
        "policy": select(model, shardings(model, mesh), adapter=True) if frozen else whole,
        "critic": {**{k: v for k, v in whole.items() if k != "head"}, "value_head": everywhere},
    }
    for name, state in states.items():
        check(state.params, places[name])
        (adam,) = (
            part
            for part in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
            if hasattr(part, "mu")
        )
        check(adam.mu, places[name])
        check(adam.nu, places[name])
    for kept in (frozen, reference):
        if kept:
            check(kept, whole)
    # And that is indeed in parts: the rules could be wrong as well.
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    heads = tensor if tensor <= 2 else 1
    layers = states["policy"].params["layers"]
    if not frozen:
        qkv = layers["attn"]["qkv"]["kernel"]
        assert qkv.addressable_shards[0].data.size * fsdp * heads == qkv.size
    else:
        q, down = layers["attn"]["q_lora"], layers["mlp"]["down_lora"]
        for array, parts in ((q["a"], fsdp), (q["b"], heads), (down["a"], tensor)):
            assert array.addressable_shards[0].data.size * parts == array.size


def main() -> None:
    path, *cases = sys.argv[1:]
    expected: dict[str, Any] = {}
    for case in cases:
        kind, *sizes, collectives = case.split(",")
        if kind not in expected:
            expected[kind] = run(path, kind, None)
        right_history, right = expected[kind]
        history, found = run(path, kind, make_mesh(*map(int, sizes)), collectives)
        for stats, wanted in zip(history, right_history, strict=True):
            assert stats.keys() == wanted.keys()
            for name in (name for name in wanted if not name.startswith("time/")):
                np.testing.assert_allclose(
                    stats[name], wanted[name], rtol=2e-5, atol=1e-6, err_msg=name
                )
        assert found.keys() == right.keys()
        for name, (array, change) in right.items():
            # What is added to a float32 is rounded to its last bit, each time.
            rounding = 2 * STEPS * np.finfo(np.float32).eps * np.abs(array).max()
            bound = 5e-5 * np.abs(change).max() + rounding
            np.testing.assert_allclose(found[name][1], change, rtol=0, atol=bound, err_msg=name)
            assert name.startswith("['merged']") or np.abs(change).max() > 3 * rounding, name
        print(case)


if __name__ == "__main__":
    main()
