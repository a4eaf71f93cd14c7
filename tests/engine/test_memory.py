"""The memory of an engine is known before allocation; an engine that does not fit is refused."""

import dataclasses
import gc

import jax
import pytest

from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines, publish_all
from coa_jax.engine.memory import (
    check_memory,
    describe_fit,
    engine_memory,
    fit_engine_config,
    free_in_groups,
    free_memory,
)
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from tests.random_params import random_params

pytestmark = pytest.mark.usefixtures("optimized")

MODEL = ModelConfig("qwen3", 199, 48, 96, 3, 6, 2, 16, qk_norm=True)
SHAPES = EngineConfig(
    slots=4, max_length=96, chunk=8, extend_buckets=(8, 32), extend_block=8, page_size=32
)


def nbytes(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16"}, {"cache_dtype": "int8"}, {"pages": 7}, {"page_size": 40}]
)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_cache_are_what_an_engine_then_has(changes, tied):
    model = dataclasses.replace(MODEL, tie_embeddings=tied)
    shapes = dataclasses.replace(SHAPES, **changes)
    engine = Engine(random_params(model), model, shapes)
    memory = engine_memory(model, shapes)
    assert memory.parameters == nbytes(engine.params)
    assert memory.cache == nbytes(engine._pages)
    assert memory.total == memory.parameters + memory.cache + memory.scratch


def test_a_published_model_takes_what_its_figures_say():
    # 28 layers, 4 key/value heads of 128, bfloat16: 57,344 bytes a token.
    qwen = ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True)
    qwen = dataclasses.replace(qwen, tie_embeddings=False)
    shapes = EngineConfig(slots=256, max_length=16384, dtype="bfloat16")
    memory = engine_memory(qwen, shapes)
    assert memory.page == 57344 * 128
    assert memory.pages == 256 * 128
    assert memory.parameters == 2 * 7_615_616_512


def test_a_pool_is_advised_by_its_pages():
    shapes = dataclasses.replace(SHAPES, slots=8, pages=20)
    pool = engine_memory(MODEL, shapes)
    assert pool.cache == 20 * pool.page
    with pytest.raises(UserError, match="set pages to 17, or"):
        check_memory(MODEL, shapes, pool.total - 3 * pool.page)


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (0.9, r"set slots to 6, or set dtype to bfloat16"),
        (0.5, "lower the largest of extend_buckets, or"),
        (0.38, "lower max_length, or"),
        (0.1, "take a smaller model, or"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_setting_that_helps(free, advice):
    shapes = dataclasses.replace(SHAPES, slots=8)
    total = engine_memory(MODEL, shapes).total
    check_memory(MODEL, shapes, total)
    check_memory(MODEL, shapes, None)
    with pytest.raises(UserError, match=advice) as caught:
        check_memory(MODEL, shapes, int(free * total))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab", [199, 40_000])
def test_the_advised_number_of_slots_is_the_largest_that_fits(vocab):
    model = dataclasses.replace(MODEL, vocab_size=vocab)

    def shapes(slots):
        return dataclasses.replace(SHAPES, slots=slots)

    free = engine_memory(model, shapes(23)).total
    with pytest.raises(UserError, match="set slots to 23,"):
        check_memory(model, shapes(64), free)
    check_memory(model, shapes(23), free)


def test_an_engine_beyond_the_machine_is_refused_before_anything_is_allocated():
    shapes = dataclasses.replace(SHAPES, slots=10**7)
    with pytest.raises(UserError, match=r"30000000 pages.* slots .* dtype "):
        Engine(random_params(MODEL), MODEL, shapes)


@pytest.fixture
def tight(monkeypatch):
    """Leaves room for parameters and an engine of `SHAPES` and for not a byte more."""
    params = random_params(MODEL)
    gc.collect()  # what earlier tests left must not become free later
    before = nbytes(jax.live_arrays())
    room = engine_memory(MODEL, SHAPES).total

    def free(device):
        return room - (nbytes(jax.live_arrays()) - before)

    monkeypatch.setattr("coa_jax.engine.memory.free_memory", free)
    return params


def test_parameters_that_have_their_memory_already_are_not_counted_again(tight):
    engine, *_ = make_engines(tight, MODEL, SHAPES)
    held = nbytes(engine.params)
    del engine
    with pytest.raises(UserError, match="set slots to 4"):
        make_engines(tight, MODEL, dataclasses.replace(SHAPES, slots=5))
    part = layout.publish(tight, MODEL, SHAPES)[0]
    assert nbytes(part) == held
    with pytest.raises(UserError, match="are free or hold its parameters already: set slots to 4"):
        Engine(part, MODEL, dataclasses.replace(SHAPES, slots=5))


def test_new_parameters_take_the_place_of_the_old_ones(monkeypatch):
    params = random_params(MODEL)
    engines = make_engines(params, MODEL, SHAPES)
    publish, held = layout.publish, []

    def measured(*arguments):
        held.append(nbytes(jax.live_arrays()))
        return publish(*arguments)

    monkeypatch.setattr(layout, "publish", measured)
    before = nbytes(jax.live_arrays())
    publish_all(engines, params)
    assert held == [before - engine_memory(MODEL, SHAPES).parameters]
    assert nbytes(jax.live_arrays()) == before


def test_devices_of_a_group_share_what_an_engine_takes():
    one, two, four = (engine_memory(MODEL, SHAPES, tensor) for tensor in (1, 2, 4))
    assert (two.parameters, two.cache) == (one.parameters / 2, one.cache / 2)
    assert four.cache == one.cache  # two heads of keys and values do not make four
    # Each device samples from all logits of 4 rows: four arrays of float32.
    many = dataclasses.replace(MODEL, vocab_size=10**6)
    assert engine_memory(many, SHAPES, 4).scratch >= 4 * 4 * 4 * 10**6
    pod = dataclasses.replace(SHAPES, slots=0, max_length=4096)
    for free in (40_000, 10**6, 10**7):
        fit = fit_engine_config(pod, MODEL, "tpu", 64, 4096, two.parameters + free, 2)
        assert engine_memory(MODEL, fit, 2).total <= two.parameters + free or fit.slots == 2
    check_memory(MODEL, SHAPES, two.total, 2)
    with pytest.raises(UserError, match=r"on each of 2 devices; .* set slots to 3"):
        check_memory(MODEL, SHAPES, two.total - two.page, 2)


def test_this_machine_says_what_is_free():
    assert free_memory(jax.devices()[0]) > 10**8


def write_group(place, limit, used, cache):
    place.mkdir(parents=True, exist_ok=True)
    one = "memory" in place.parts
    maximum, usage = ("limit_in", "usage_in") if one else ("max", "current")
    ending = "_bytes" if one else ""
    (place / f"memory.{maximum}{ending}").write_text(f"{limit}\n")
    (place / f"memory.{usage}{ending}").write_text(f"{used}\n")
    counts = f"anon 5\ninactive_file {cache}\n" + f"total_inactive_file {2 * cache}\n" * one
    (place / "memory.stat").write_text(counts)


@pytest.mark.parametrize(
    ("listing", "groups", "free"),
    [
        ("0::/a/b", {"a": (1000, 400, 7), "a/b": ("max", 300, 7)}, [607]),
        ("0::/a/b", {"a": (1000, 400, 0), "a/b": (500, 300, 10)}, [210, 600]),
        ("0::/", {"": (100, 300, 10)}, [0]),
        ("0::/../elsewhere", {"": (900, 300, 10)}, [610]),
        ("7:cpu:/\n4:memory:/pod\n0::/", {"memory/pod": (800, 300, 10)}, [520]),
        ("4:cpu,memory:/docker/of-the-host", {"memory": (2**63 - 4096, 0, 0)}, [2**63 - 4096]),
        ("", {}, []),
    ],
)
def test_limits_of_containers_count(tmp_path, listing, groups, free):
    (tmp_path / "cgroup").write_text(listing)
    for path, numbers in groups.items():
        write_group(tmp_path / "fs" / path, *numbers)
    assert list(free_in_groups(tmp_path / "cgroup", tmp_path / "fs")) == free


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_shapes_fit_the_samples_and_the_memory_and_never_exceed_what_was_asked_for(platform):
    pod = EngineConfig(slots=64, max_length=32_768, chunk=32, extend_buckets=(256, 4096))
    fit = fit_engine_config(pod, MODEL, platform, 5, 1000, None)
    assert (fit.slots, fit.max_length) == (5, 1000)
    assert fit.on_platform(platform).extend_buckets == ((64,) if platform == "cpu" else (256, 4096))

    assert fit.chunk == (8 if platform == "cpu" else 32)
    assert "5 of 64 slots, 1,000 of 32,768 positions" in describe_fit(pod, fit)
    assert (
        fit_engine_config(pod, MODEL, platform, 1, 1000, None).slots == 2
    )  # one slot has other sums
    open_slots = dataclasses.replace(pod, slots=0)
    assert fit_engine_config(open_slots, MODEL, platform, 5, 1000, None) == fit
    assert describe_fit(open_slots, fit).startswith("5 slots, 1,000 of 32,768 positions")
    assert fit_engine_config(open_slots, MODEL, platform, 10**6, 1000, None).slots <= 256
    # Where the longest sequences do not fit, the slots share what memory holds.
    for pages in (8, 9, 17, 39):
        free = engine_memory(MODEL, dataclasses.replace(fit, pages=pages)).total
        shared = fit_engine_config(pod, MODEL, platform, 5, 1000, free)
        assert (shared.slots, shared.pages) == (5, pages)
    assert "39 pages of 128 positions that the slots share" in describe_fit(pod, shared)
    none = fit_engine_config(pod, MODEL, platform, 5, 1000, 0)
    assert (none.slots, none.pages) == (2, 8)  # the engine says what helps
    small = dataclasses.replace(SHAPES, engines=2, slots=2)
    assert fit_engine_config(small, MODEL, platform, 9, 10**6, None) == small
    assert describe_fit(small, small).endswith("tokens a chunk")
    pool = dataclasses.replace(pod, pages=10**6)
    assert fit_engine_config(pool, MODEL, platform, 5, 1000, None).num_pages == 5 * 8


@pytest.mark.parametrize(
    ("platform", "defaults", "block"), [("tpu", (128, 512), 128), ("cuda", (32, 128, 512), 32)]
)
def test_prefill_takes_the_longest_block_that_divides_its_programs(platform, defaults, block):
    buckets = ((), (16,), (256, 1024))
    found = [EngineConfig(extend_buckets=b).on_platform(platform) for b in buckets]
    assert [(c.extend_buckets, c.extend_block) for c in found] == [
        (defaults, block),
        ((16,), 16),
        ((256, 1024), block),
    ]
    assert EngineConfig(extend_block=16).on_platform(platform).extend_block == 16
