"""Decoding equals the full forward pass, and no bookkeeping of slots changes what is decoded."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.config.fields import field_annotations, parts
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.compute import REFERENCE
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import bind
from tests.random_params import gemma3, random_params

MODEL = ModelConfig("qwen3", 199, 48, 96, 3, 6, 2, 16, qk_norm=True)
PARAMS = random_params(MODEL, 3)
SHAPES = EngineConfig(
    slots=4, max_length=96, chunk=8, extend_buckets=(8, 32), extend_block=8, page_size=32
)
GREEDY = SamplingParams(temperature=0.0)
# The window ends within pages, and sequences leave whole pages behind.
GEMMA = gemma3(MODEL, window=13)
ADAPTED = dataclasses.replace(MODEL, lora=LoraConfig(rank=3, alpha=40.0))
PROMPT = [5, 17, 3, 120, 44, 9, 9, 61, 2, 77, 31]


@pytest.fixture(params=["qwen3", "gemma3", "adapters"])
def family(request, monkeypatch):
    """Runs a test with the architecture above, with one that has windows, and with adapters."""
    if request.param != "qwen3":
        other = GEMMA if request.param == "gemma3" else ADAPTED
        monkeypatch.setitem(globals(), "MODEL", other)
        monkeypatch.setitem(globals(), "PARAMS", random_params(other, 3))


# Of two long tests, one family is among the default tests.
ONE_FAMILY = pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "adapters"))],
    indirect=True,
)


def make(**changes):
    return Engine(PARAMS, MODEL, dataclasses.replace(SHAPES, **changes))


def begin(engine, slot, prompt, limit, sampling=GREEDY, key=(0, 0, 0)):
    engine.start(slot, len(prompt), last_token=prompt[-1], limit=limit, key=key, sampling=sampling)
    engine.set_active(slot, True)


def run(engine, slots):
    tokens = {slot: [] for slot in slots}
    logps = {slot: [] for slot in slots}
    while engine.any_active:
        chunk = engine.decode()
        for slot in slots:
            count = chunk.count[slot]
            tokens[slot] += chunk.tokens[slot, :count].tolist()
            logps[slot] += chunk.logps[slot, :count].tolist()
    return tokens, logps


@functools.partial(jax.jit, static_argnames="config")
def full_logits(params, tokens, config):
    decoder = bind(config, params)
    hidden, _ = decoder(tokens, jnp.arange(tokens.shape[1]), REFERENCE)
    return decoder.logits(hidden, REFERENCE)[0]


def reference_logits(ids):
    # Attention is causal, so padding at the end changes nothing before it.
    padded = np.zeros((1, SHAPES.max_length), np.int32)
    padded[0, : len(ids)] = ids
    return full_logits(PARAMS, padded, config=MODEL)[: len(ids)]


def reference_greedy(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(np.asarray(reference_logits(ids)[-1]))))
    return ids[len(prompt) :]


def sampled(engine, slot, others=()):
    """One sample in a slot, with others beside it."""
    for number, other in enumerate(others):
        prompt = PROMPT[: 3 + number]
        engine.extend([(other, 0, prompt)])
        begin(engine, other, prompt, 20 + 9 * number, SamplingParams(top_p=0.8), (1, 2, number))
    engine.extend([(slot, 0, PROMPT)])
    begin(engine, slot, PROMPT, 60, SamplingParams(), (4, 5, 6))
    tokens, logps = run(engine, [slot])
    return tokens[slot], logps[slot]


def test_a_single_slot_samples_what_several_do():
    tokens, logps = sampled(make(slots=1), 0)
    expected, expected_logps = sampled(make(), 2)
    assert tokens == expected
    np.testing.assert_allclose(logps, expected_logps, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 3, 16, 33])
def test_all_slots_fit_into_the_largest_program(slots):
    sizes = EngineConfig(slots=slots).row_sizes
    assert sizes[-1] == (1 if slots == 1 else slots)
    assert list(sizes) == sorted(set(sizes))
    assert EngineConfig(slots=slots, decode_programs=1).row_sizes == sizes[-1:]


def test_programs_decode_equal_parts_of_the_slots_in_whole_eights():
    assert EngineConfig(slots=32).row_sizes == (8, 16, 24, 32)
    assert EngineConfig(slots=33, decode_programs=3).row_sizes == (16, 24, 33)
    assert EngineConfig(slots=16).row_sizes == (8, 16)
    assert EngineConfig(slots=7).row_sizes == (7,)


@pytest.mark.slow
def test_bytes_for_keys_and_values_move_log_probabilities_only_a_little():
    tokens, logps = sampled(make(), 0)
    engine = make(cache_dtype="int8")
    engine.extend([(0, 0, PROMPT)])
    begin(engine, 0, PROMPT, 60, SamplingParams(), (4, 5, 6))
    rough, rough_logps = run(engine, [0])
    same = np.asarray(tokens) == np.asarray(rough[0])
    first = len(same) if same.all() else int(np.argmin(same))
    assert first >= 8
    gap = np.abs(np.asarray(logps[:first]) - np.asarray(rough_logps[0][:first]))
    assert 0 < gap.max() < 0.05


@pytest.mark.usefixtures("family")
def test_log_probabilities_are_those_of_the_full_forward_pass():
    engine = make()
    engine.extend([(0, 0, PROMPT)])
    begin(engine, 0, PROMPT, 70, SamplingParams(temperature=0.7))
    tokens, logps = run(engine, [0])
    ids = PROMPT + tokens[0]
    full = jax.nn.log_softmax(reference_logits(ids) / 0.7)
    at = np.arange(len(PROMPT) - 1, len(ids) - 1)
    np.testing.assert_allclose(logps[0], full[at, np.asarray(tokens[0])], atol=1e-4)


@pytest.mark.usefixtures("family")
def test_tokens_set_back_leave_no_trace():
    engine = make(chunk=32)
    engine.extend([(1, 0, PROMPT)])
    begin(engine, 1, PROMPT, 90)
    chunk = engine.decode()
    kept = chunk.tokens[1, :4].tolist()
    # The harness forgets what follows the fourth token and adds an observation.
    engine.truncate(1, len(PROMPT) + 4, kept[-1])
    observation = [8, 15, 99, 100, 6]
    start = len(PROMPT) + 3
    engine.extend([(1, start, [kept[-1], *observation])])
    engine.set_active(1, True)
    tokens, _ = run(engine, [1])
    context = PROMPT + kept + observation
    assert tokens[1][:12] == reference_greedy(context, 12)


def test_a_fork_decodes_as_if_it_had_been_prefilled():
    engine = make()
    engine.extend([(0, 0, PROMPT)])
    engine.fork(0, [1, 3], len(PROMPT))
    for slot in (0, 1, 3):
        begin(engine, slot, PROMPT, 40)
    tokens, _ = run(engine, [0, 1, 3])
    assert tokens[0] == tokens[1] == tokens[3] == reference_greedy(PROMPT, 40 - len(PROMPT))


def test_no_room_is_said_before_anything_is_written():
    engine = make(pages=4)
    assert engine.reserve(0, 96)
    assert not engine.reserve(1, 64)
    assert engine.reserve(1, 30)
    with pytest.raises(RuntimeError, match=r"pages .*Engine\.grow"):
        engine.extend([(2, 0, PROMPT)])
    engine.extend([(1, 0, PROMPT * 2)])
    begin(engine, 1, PROMPT * 2, 40)
    engine.decode()
    assert engine.reach(1) == 38 and not engine.grow(1, 38)
    with pytest.raises(RuntimeError, match=r"pages .*Engine\.grow"):
        engine.decode()
    engine.release(0)
    assert engine.grow(1, 38)
    assert run(engine, [1])[0][1] == reference_greedy(PROMPT * 2, 18)[8:]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"extend_buckets": (8, 20)}, "extend_buckets are 8, 20; give ascending multiples of ext"),
        ({"extend_buckets": (32, 8)}, "extend_buckets are 32, 8"),
        ({"slots": 0}, "slots is 0, which only RL and evaluations can choose: give a number"),
        ({"extend_buckets": (0, 8)}, r"extend_buckets\[0\] is 0; give a whole number from 1"),
        ({"pages": 2}, "pages is 2, but a sequence of max_length 96 has 3 pages of 32"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(shapes, message):
    with pytest.raises(UserError, match=message):
        make(**shapes)


ZERO_MEANS_AUTO = ("slots", "pages", "extend_block", "engines")
NUMBERS = [name for name, kind in field_annotations(EngineConfig).items() if parts(kind)[0] is int]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_would_hang_or_break_the_engine_are_refused(name):
    for value in (-1, *([0] if name not in ZERO_MEANS_AUTO else [])):
        with pytest.raises(UserError, match=rf"^{name} is {value}; give a whole number from"):
            dataclasses.replace(SHAPES, **{name: value})
    dataclasses.replace(SHAPES, **{name: 1})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, float("inf"), float("nan"))),
        ("top_p", (0.0, -0.5, 1.01, float("nan"))),
        ("top_k", (-1,)),
    ],
)
def test_sampling_beyond_its_ranges_is_refused(name, values):
    for value in values:
        with pytest.raises(UserError, match=f"{name} is {value}; give"):
            SamplingParams(**{name: value})


@pytest.mark.usefixtures("family")
def test_a_prompt_longer_than_the_largest_bucket_is_fed_in_pieces():
    long = (PROMPT * 7)[:75]
    engine = make()
    engine.extend([(2, 0, long), (0, 0, PROMPT)])
    begin(engine, 2, long, 85)
    begin(engine, 0, PROMPT, 21)
    tokens, _ = run(engine, [0, 2])
    assert tokens[2] == reference_greedy(long, 10)
    assert tokens[0] == reference_greedy(PROMPT, 10)


@pytest.mark.parametrize("kind", [int, np.int64])
@pytest.mark.parametrize("numbers", [(2**31, 0, 0), (0, 2**32, 0), (0, 0, -(2**31) - 1)])
def test_a_key_of_more_bits_than_it_has_is_no_other_key(numbers, kind):
    with pytest.raises(OverflowError):
        begin(make(), 0, PROMPT, 30, key=tuple(map(kind, numbers)))


def test_an_idle_slot_keeps_its_cache_while_others_decode():
    engine = make()
    engine.extend([(0, 0, PROMPT), (1, 0, PROMPT[::-1])])
    begin(engine, 0, PROMPT, 40)
    begin(engine, 1, PROMPT[::-1], 40)
    engine.set_active(1, False)
    run(engine, [0])
    engine.set_active(1, True)
    tokens, _ = run(engine, [1])
    assert tokens[1] == reference_greedy(PROMPT[::-1], 29)


def test_more_positions_than_the_model_was_trained_for_are_told_of_once(caplog):
    make()
    assert caplog.text == ""
    short = dataclasses.replace(MODEL, max_position=64)
    for _ in range(2):
        Engine(PARAMS, short, SHAPES)
    said = "engine.max_length lets sequences have 96 tokens, but the model was trained for 64 "
    assert caplog.text.count(said) == 1


def test_stop_tokens_and_limits_end_a_sequence():
    free = make()
    free.extend([(0, 0, PROMPT)])
    begin(free, 0, PROMPT, 30)
    expected = run(free, [0])[0][0]
    stop = expected[5]
    engine = Engine(PARAMS, MODEL, SHAPES, stop_tokens=[stop, 198])
    engine.extend([(0, 0, PROMPT)])
    begin(engine, 0, PROMPT, 30)
    assert run(engine, [0])[0][0] == expected[: expected.index(stop) + 1]
    assert len(expected) == 30 - len(PROMPT)


def test_a_sequence_beyond_the_slot_is_refused():
    with pytest.raises(ValueError, match="exceed 96"):
        make().extend([(0, 0, [1] * 97)])


def test_decoding_compiles_once_for_all_chunk_sizes_and_lengths():
    programs.decode_chunk.clear_cache()
    for chunk in (1, 8, 32):
        engine = make(chunk=chunk)
        for length in (2, 11):
            engine.extend([(0, 0, PROMPT[:length])])
            begin(engine, 0, PROMPT[:length], 40, SamplingParams(top_p=0.9, top_k=chunk))
            run(engine, [0])
    assert programs.decode_chunk._cache_size() == 1


# --- compiled with all optimizations, until the end of the file ---------------------------------


@pytest.mark.usefixtures("optimized", "family")
@ONE_FAMILY
def test_a_group_holds_the_whole_pages_of_its_prompt_once():
    engine = make(pages=12)
    long = (PROMPT * 6)[:65]  # two whole pages of 32 and a token, which decoding writes again
    assert engine.reserve(0, 96)
    engine.extend([(0, 0, long)])
    for slot in (1, 2, 3):
        assert engine.reserve(slot, 96, 0, len(long))
    assert len(engine.pages._free) == 12 - 3 - 3
    engine.fork(0, [1, 2, 3], len(long))
    for slot in range(4):
        begin(engine, slot, long, 90, SamplingParams(), (0, 0, slot))
    together, _ = run(engine, range(4))
    engine.release(0)
    assert len(engine.pages._free) == 12 - 2 - 3
    # The others still read what slot 0 has let go.
    for slot in range(1, 4):
        engine.release(slot)
    assert len(engine.pages._free) == 12
    for slot in range(4):
        alone = make()
        alone.extend([(0, 0, long)])
        begin(alone, 0, long, 90, SamplingParams(), (0, 0, slot))
        assert run(alone, [0])[0][0] == together[slot]


@pytest.mark.usefixtures("optimized", "cpu_ops", "family")
@ONE_FAMILY
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param({"chunk": 1, "slots": 7}, marks=pytest.mark.slow),
        pytest.param({"chunk": 32, "slots": 2}, marks=pytest.mark.slow),
        pytest.param({"chunk": 3, "slots": 16}, marks=pytest.mark.slow),
        pytest.param({"slots": 16, "decode_programs": 5}, marks=pytest.mark.slow),
        pytest.param({"pages": 9}, marks=pytest.mark.slow),
        {"chunk": 1, "slots": 33, "pages": 90, "extend_buckets": (16, 48, 200)},
    ],
)
def test_a_sample_has_the_same_bits_under_all_shapes_and_beside_others(shapes):
    expected = sampled(make(), 2)
    slots = shapes.get("slots", SHAPES.slots)
    assert sampled(make(**shapes), slots - 1) == expected
    assert sampled(make(**shapes), 0, others=range(1, min(slots, 3))) == expected


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes on a CPU")
@pytest.mark.usefixtures("optimized", "cpu_ops")
def test_no_step_copies_weights():
    engine = make(slots=2, decode_programs=1)
    program = engine.lower_decode().compile().as_text() or ""
    copies = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", program)
    copied = {math.prod(map(int, shape.split(","))) for shape in copies}
    matrices = {x.size for x in jax.tree.leaves(engine.params.layers) if x.ndim > 1}
    assert not copied & matrices
