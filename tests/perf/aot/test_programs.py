"""What is compiled is what a run executes: the same arrays in the same places."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from coa_jax.demo.bpe import train_bpe
from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.constraint import Constraint, ConstraintTables
from coa_jax.errors import UserError
from coa_jax.model.attention.choice import missing
from coa_jax.model.compute import local_compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import num_params, split_trained, without_adapters
from coa_jax.parallel.mesh import AXES
from coa_jax.parallel.slices import Slice
from coa_jax.perf.aot import programs
from coa_jax.perf.aot.programs import all_programs
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train import arrays, experience, logps, step
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.arrays import Setup, micro_batches, set_up
from coa_jax.train.batch import Batch, empty_batch
from coa_jax.train.config import TeacherConfig
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import init_state
from coa_jax.train.update import critic_state, reference_params, update
from tests.devices import on_devices
from tests.train.test_update import LENGTH, MODEL, config, groups, params
from tests.train.tiny_runs import rl_config

WEIGHTS = 4 * num_params(MODEL)  # bytes in float32


def setup_of(settings: RLConfig, model: ModelConfig = MODEL) -> Setup:
    """A run of a tiny model on one chip."""
    return set_up(settings, model, Slice("gpu:1xh100", "h100", (1,)), jax.devices()[:1])


def tiny_setup(**changes: object) -> Setup:
    """A small RL run on one chip."""
    return setup_of(rl_config(Path("m"), Path("t"), **changes))


PARTS = """
import sys, jax
from coa_jax.train.arrays import set_up
from coa_jax.parallel.slices import parse_slice
from coa_jax.perf.aot.estimate import _step
from coa_jax.errors import UserError
from coa_jax.parallel.config import MeshConfig
from tests.train.test_update import MODEL
from tests.train.tiny_runs import rl_config

for case in sys.argv[1:]:
    name, data, fsdp, tensor, decode = case.split(",")
    where, mesh = parse_slice(name), MeshConfig(int(data), int(fsdp), int(tensor), int(decode))
    config = rl_config("m", "t", mesh=mesh)
    try:
        setup = set_up(config, MODEL, where, jax.devices()[: where.count])
    except UserError as error:
        print(str(error).partition(":")[0])
        continue
    rows = [
        {"name": name, "roofline": {"step_s": seconds, "serial_s": 1.0}, "runs_per_step": 1}
        for name, seconds in (("train", 1e-12), ("decode", config.engine.chunk))
    ]
    step = _step(setup, rows)
    speed = step["decode_tokens_per_s"] / config.engine.row_sizes[-1]
    mfu = step["model_flops"] / 1e-12 / where.chip.flops / step["mfu"]
    print(setup.mesh.size, "chips", round(mfu), "at work", round(speed), "engines")
"""


@pytest.mark.slow
def test_figures_are_of_the_chips_that_work_and_all_of_several_hosts_do():
    cases = {
        "gpu:8xh100,1,4,1,2": "4 chips 4 at work 2 engines",
        "gpu:16xh100,1,-1,1,8": "16 chips 16 at work 2 engines",
        "gpu:16xh100,1,4,1,2": "mesh data=1, fsdp=4, tensor=1 has 4 of the 16 devices of 2 "
        "processes, but it must have all of them",
        "gpu:16xh100,1,1,16,0": "16 chips that decode together span hosts of --topology=gpu",
        "gpu:24xh100,1,-1,1,3": "3 chips that decode together span hosts of --topology=gpu",
    }
    printed = on_devices(24, "-c", PARTS, *cases)
    assert printed == list(cases.values())


CACHE = """
import sys, jax, jax.numpy as jnp
from coa_jax.train import arrays
from coa_jax.train.arrays import chip_bytes, engine_compute, pages, set_up
from coa_jax.parallel.slices import Slice
from coa_jax.engine import layout
from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.placement import replicate
from coa_jax.parallel.config import MeshConfig
from tests.train.tiny_runs import rl_config

for case in sys.argv[1:]:
    heads, dtype = case.split(",")
    model = ModelConfig("qwen2", 64, 128, 64, 2, 2 * int(heads), int(heads), 128)
    engine = EngineConfig(4, 192, page_size=16, dtype="bfloat16", cache_dtype=dtype)
    config = rl_config("m", "t", engine=engine, mesh=MeshConfig(1, 4, 1, 4))
    # The chips are simulated; what is chosen is what those of a TPU can run.
    setup = set_up(config, model, Slice("v5e:2x2", "v5e", (2, 2)), jax.devices())
    compute = engine_compute(setup)
    params = {"x": replicate(jnp.zeros(4), compute.mesh)}
    real = jax.tree.leaves(layout.new_pages(params, model, engine, compute))
    for expected, found in zip(real, jax.tree.leaves(pages(setup)), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.sharding == expected.sharding, (found.sharding, expected.sharding)
    chip = sum(x.addressable_shards[0].data.nbytes for x in real)
    assert chip_bytes(pages(setup)) == chip
    print(case, compute.attention, sum(x.nbytes for x in real) // chip)
"""


@pytest.mark.slow
def test_the_cache_is_split_as_an_engine_splits_it():
    # A kernel's pages hold twice as many rows as heads, which four devices could split where they
    # cannot split two heads.  All of six heads stay on each device, and no kernel takes six.
    cases = {"2,": "ragged_paged 1", "4,": "ragged_paged 4", "6,": "xla 1", "4,int8": "xla 4"}
    printed = on_devices(4, "-c", CACHE, *cases)
    assert printed == [" ".join(case) for case in cases.items()]


def test_engines_have_nothing_while_the_policy_learns_unless_rollouts_go_on():
    # A slot has two pages of 128 positions of float32 keys and values.
    cache, moments = 4 * 2 * 128 * 2 * 8 * 4, 2 * WEIGHTS + 5 * 4
    lying = {program.name: program.lying for program in all_programs(tiny_setup())}
    # Beside the parameters, which `publish` takes, there are two moments and counters.
    assert (lying["train"], lying["publish"]) == (0, moments)
    assert lying["decode"] == moments + WEIGHTS
    stale = {program.name: program.lying for program in all_programs(tiny_setup(max_staleness=1))}
    assert (stale["train"], stale["publish"]) == (WEIGHTS + cache, moments + WEIGHTS + cache)
    assert stale["decode"] == moments + 2 * WEIGHTS


def test_adapters_lie_beside_one_frozen_model_and_are_published_alone_where_engines_keep_it():
    lora = LoraConfig(rank=2)
    adapters = 4 * (num_params(dataclasses.replace(MODEL, lora=lora)) - num_params(MODEL))

    def figures(**changes):
        setup = tiny_setup(lora=lora, **changes)
        lying = {program.name: program.lying for program in all_programs(setup)}
        (publish,) = (p for p in all_programs(setup) if p.name == "publish")
        (given,) = publish.lower().args_info[0]
        return lying, sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(given))

    # Two moments of each adapter beside the base, which training and engine share.
    lying, given = figures()
    assert (lying["publish"], given) == (WEIGHTS + 2 * adapters + 5 * 4, adapters)
    kept = 3 * adapters + 5 * 4
    assert lying["decode"] == kept
    lying, given = figures(max_staleness=1)
    assert given == adapters
    assert lying["decode"] == kept + adapters
    # A base that is computed in bfloat16 is kept in bfloat16; the engine has a copy in float32.
    lying, given = figures(dtype="bfloat16")
    assert given == WEIGHTS // 2 + adapters
    assert lying["decode"] == kept + WEIGHTS // 2
    lying, given = figures(dtype="bfloat16", max_staleness=1)
    assert given == adapters
    assert lying["decode"] == kept + WEIGHTS // 2 + adapters


# --- what a step of learning runs ----------------------------------------------------------

EVERYTHING = Constraint(
    tables=ConstraintTables(
        allowed=jnp.full((1, 2), 2**32 - 1, jnp.uint32),
        next_state=jnp.zeros((1, 1), jnp.int32),
        kind=jnp.zeros(61, jnp.int32),
        ends=jnp.zeros(1, bool),
    ),
    start={"generalist": 0},
    observed=np.full(1, -1, np.int32),
)
"""A constraint that allows every token, in the one state that it has."""

SLOW = pytest.mark.slow
CORRECTED = {"old_logp": "trainer", "tis_cap": 2.0}
"""Surplus groups are as old as an update: own scores need the correction for it."""
# Algorithm, knobs, other settings, whether constrained, and the programs that are expected.
CASES = {
    "a penalty in the loss": ("grpo", {}, {}, True, ["score", "train"]),
    "no scores": ("gspo", {}, {}, False, ["train"]),
    "a critic": ("ppo", {}, {"mini_batch": 1}, False, ["score", "values", "train", "critic"]),
    "all there is": (
        "ppo",
        {"old_logp": "trainer"},
        {"mini_batch": 1, "lora": LoraConfig(rank=2), "attention_length": 3 * LENGTH},
        True,
        ["score_adapters", "score", "values", "train", "critic"],
    ),
    "own scores": ("dapo", CORRECTED, {"mini_batch": 1}, True, ["score", "train"]),
    "own scores, one update": ("dapo", CORRECTED, {}, False, ["train"]),
    "a penalty in the reward": (
        "reinforce++",
        {"old_logp": "trainer"},
        {},
        False,
        ["score", "train"],
    ),
}
DEFAULT = ("all there is",)
ENGINES = ("merge", "publish", "extend", "decode", "fork")


def form(tree):
    """Structure, shapes and dtypes of arguments."""
    return jax.tree.map(lambda x: (tuple(x.shape), jnp.dtype(x.dtype).name), tree)


def handed(settings: RLConfig, constraint: Constraint | None) -> list[tuple[str, tuple]]:
    """(Name, arguments) of the programs that an update runs; they are traced, not compiled."""
    found = []
    graded = groups()  # which scores as well
    start = jax.tree.map(jnp.copy, params())
    model = dataclasses.replace(MODEL, lora=settings.lora)
    trained, frozen = split_trained(start, model, seed=0)
    if settings.shares_base(model, None, "cuda"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "kernels_for", lambda *_, **__: "inputs_first")
            copy = jax.tree.map(jnp.copy, frozen)
            frozen = layout.share_base(copy, without_adapters(model))
    state, critic = init_state(trained, settings.optimizer, frozen), critic_state(settings, start)

    def recorder(name, program):
        def recorded(*arguments, **options):
            allowed = (options["allowed"],) if "allowed" in options else ()
            found.append((name, (*arguments, *allowed)))
            shapes = jax.eval_shape(lambda *a: program(*a, **options), *arguments)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        patched = ((step, "train_program"), (experience, "score"), (experience, "score_values"))
        for module, name in patched:
            patch.setattr(module, name, recorder(name, getattr(module, name)))
        update(
            settings, state, model, graded, local_compute(), constraint,
            critic=critic, reference=reference_params(settings, start),
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    "case", [c if c in DEFAULT else pytest.param(c, marks=SLOW) for c in CASES]
)
def test_the_programs_of_a_step_take_what_an_update_hands_them(case):
    name, knobs, changes, constrained, expected = CASES[case]
    settings = config(name, knobs=knobs, **changes)
    calls = handed(settings, EVERYTHING if constrained else None)
    setup = setup_of(settings)
    if constrained:
        setup = dataclasses.replace(setup, rules=jax.eval_shape(lambda: EVERYTHING.tables))
    programs = {p.name: p for p in all_programs(setup) if p.name not in ENGINES}
    assert list(programs) == expected

    wanted = {kind: form(program.lower().args_info[0]) for kind, program in programs.items()}
    batches = 0
    for arguments in (a for name, a in calls if name == "train_program"):
        kind = "critic" if "value_head" in arguments[0].params else "train"
        batches += int(arguments[3]) if kind == "train" else 0
        assert form(arguments) == wanted[kind]
    for kind in programs.keys() - {"train", "critic"}:
        given = [a for name, a in calls if "score" in name and form(a[0]) == wanted[kind][0]]
        assert len(given) == programs[kind].runs * batches / micro_batches(settings)
        for parameters, batch, *rest in given:
            assert form((parameters, batch, *rest)) == wanted[kind]


def test_a_chip_has_all_of_the_run_whatever_it_runs():
    # Policy and critic with two moments each, the reference; the engine's parameters, and a page
    # of 128 positions for each of four slots.
    kept, engine = (3 + 3 + 1) * WEIGHTS, WEIGHTS + 4 * 128 * 2 * 8 * 4
    for program in all_programs(setup_of(config("ppo", mini_batch=1))):
        # Batches come and go.
        given = [x for x in program.lower().args_info[0] if not isinstance(x, Batch)]
        size = sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(given))
        there = kept + engine if program.name in ("extend", "decode", "fork") else kept
        assert program.lying + size == pytest.approx(there, rel=0.01), program.name


def test_a_checkpoint_is_read_with_room_for_its_largest_array_and_a_model_gathered_by_tensors():
    setup = tiny_setup()
    largest = max(4 * x.size for x in jax.tree.leaves(params()))
    assert arrays.resume_bytes(setup) == 3 * WEIGHTS + 5 * 4 + largest
    assert arrays.export_bytes(setup) == 3 * WEIGHTS + 5 * 4
    # The embeddings are the largest tensor of a layer or beside the layers.
    several = dataclasses.replace(setup, hosts=2)
    gathered = arrays.export_bytes(several) - arrays.export_bytes(setup)
    assert gathered == 4 * MODEL.vocab_size * MODEL.hidden_size
    # Of a run that trains adapters only these are in a checkpoint.
    adapted = tiny_setup(lora=LoraConfig(rank=2))
    assert arrays.resume_bytes(adapted) - arrays.training_bytes(adapted) < largest


def test_a_teacher_lies_on_the_chips_and_scores(monkeypatch):
    monkeypatch.setattr(arrays, "architecture_of", lambda name: (name, MODEL))
    settings = config("opd", teacher=TeacherConfig(model="teacher"), group_size=1, dtype="bfloat16")
    found = {program.name: program for program in all_programs(setup_of(settings))}
    # In bfloat16 beside the policy and its moments in float32.
    assert found["score_teacher"].lying == pytest.approx(3 * WEIGHTS, rel=0.01)
    assert found["train"].lying == pytest.approx(WEIGHTS / 2, rel=0.01)
    assert found["score_teacher"].runs == micro_batches(settings)


@pytest.mark.parametrize(("rows", "length"), [(1, 40), (2, 40), (8, 192), (64, 1025), (600, 9)])
def test_the_loop_over_the_output_head_turns_as_often_as_is_counted(rows, length):
    settings = rl_config(
        Path("m"), Path("t"), rows=rows, row_length=length,
        engine=EngineConfig(4, 9, 8, (32,)), rollout=RolloutConfig(9),
    )  # fmt: skip
    (train, *_) = all_programs(setup_of(settings))
    batch = empty_batch(rows, length)
    hidden, _ = jax.eval_shape(
        lambda weights: logps._hidden(weights, MODEL, batch, local_compute(), None)[::2],
        params(),
    )
    assert train.data_trips[1] == hidden.shape[0]


# --- constraints ---------------------------------------------------------------------------


def test_the_tables_of_a_constraint_are_those_of_the_tokenizer(tmp_path):
    protocol, tasks = get_protocol("mhqa"), str(tmp_path / "tasks.jsonl")
    tags = [f"<{slash}{role}>" for role in protocol.roles for slash in ("", "/")]
    tokenizer = train_bpe([render_prompt(protocol, "Why?", "brief")], 400, tags=tags)
    tokenizer.save_pretrained(tmp_path / "model")
    settings = rl_config(
        tmp_path / "model",
        Path(f"{tasks}:protocol=mhqa"),
        rollout=RolloutConfig(192, 3, 48, constrain=True),
    )
    model = dataclasses.replace(MODEL, vocab_size=400)
    known = setup_of(settings, model)
    assert known.unknown == ""
    states, kinds = known.rules.next_state.shape
    assert kinds > 1
    assert known.rules.allowed.shape == (states, 13)

    unknown = setup_of(dataclasses.replace(settings, model="nowhere"), model)
    assert form(unknown.rules._replace(next_state=known.rules.next_state)) == form(known.rules)
    assert unknown.rules.next_state.shape == (states, 1)
    assert f"{4 * states} bytes" in unknown.unknown
    assert "nowhere" in unknown.unknown
    assert arrays.chip_bytes(arrays.tables(unknown, unknown.mesh)) == (
        4 * 13 * states + 4 * states + 4 * 400 + states
    )

    with pytest.raises(UserError, match=r"protocols of the tasks are not known.*protocol=web"):
        setup_of(dataclasses.replace(settings, tasks=tasks), model)


# --- attention for which something stands in -----------------------------------------------


def test_attention_over_copies_of_a_prompt_is_counted_with_them():
    train, unfolded = (
        next(p for p in all_programs(tiny_setup(**changes)) if p.name == "train")
        for changes in ({}, {"attention_length": 3 * 192})
    )
    assert train.kernel_flops > 0
    assert unfolded.kernel_flops == 9 * train.kernel_flops


@pytest.mark.parametrize("name", ["cudnn", "auto", "tokamax"])
def test_arrays_of_a_kernel_for_gpus_are_counted(name):
    if name == "tokamax":
        pytest.importorskip("tokamax")
    shapes = {"dtype": "bfloat16", "row_length": 191, "rollout": RolloutConfig(96)}
    algorithm = Algorithm("ppo")
    two = tiny_setup(**shapes, attention=name, algorithm=algorithm, mini_batch=1)
    sizes = {program.name: program.kernel_bytes for program in all_programs(two)}
    # Two rows of an even length have a mask and a bias; the gradient of the bias is another array.
    score, train = 3 * 2 * 192**2, 5 * 2 * 192**2
    if name == "auto":  # two rows of whole blocks: keys, values and their gradients
        score = 2 * 2 * (2 * 256 * two.model.num_heads * two.model.head_dim)
        train = 2 * score
    elif name == "tokamax":  # repeats nothing
        if reason := missing("causal", name):
            pytest.skip(reason)
        score, train = 0, 2 * (2 * 256 * two.model.num_heads * two.model.head_dim) * 2
    expected = {"score": score, "values": score, "train": train, "critic": train}
    assert sizes == {**expected, **dict.fromkeys(("publish", "extend", "decode", "fork"), 0)}
    # Each of two chips has a row.
    halves = AbstractMesh((1, 2, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    assert programs._kernel_bytes(dataclasses.replace(two, mesh=halves)) == train / 2
    # Training in float32 uses no kernel.
    assert programs._kernel_bytes(tiny_setup(**{**shapes, "dtype": "float32"})) == 0
