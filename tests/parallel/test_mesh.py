"""Sharding rules, and a sharded forward pass on eight fake CPU devices."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from coa_jax.engine.layout import decode_mesh, groups_of
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params, shardings, specs
from coa_jax.parallel import placement
from coa_jax.parallel.config import MeshConfig
from coa_jax.parallel.mesh import (
    AXES,
    DECODE_RULES,
    RULES,
    make_mesh,
    sharding_for,
)
from coa_jax.parallel.placement import split_devices, training_mesh
from tests.devices import on_devices

CONFIG = ModelConfig("qwen2", 384, 48, 80, 3, 4, 2, 12, qkv_bias=True, tie_embeddings=False)
MESH = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


def spec(axes, rules=RULES, shape=None):
    return sharding_for(MESH, axes, rules, shape).spec


def test_devices_that_do_nothing_of_their_own_are_told_of(caplog):
    assert training_mesh(MeshConfig(), rows=3) is None
    assert caplog.text == ""
    mesh = AbstractMesh((2, 4, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    devices = jax.devices()[:1] * 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        patch.setattr(placement, "make_mesh", lambda *_: mesh)
        training_mesh(MeshConfig(2, 4), rows=12)
    assert "the mesh has 8 of 16 devices" in caplog.text
    assert "rows is 12, which mesh.data x mesh.fsdp = 8 does not divide" in caplog.text


def test_rules_name_mesh_axes_only():
    logical = {axis for s in specs(CONFIG).values() for axis in s.axes} | {"batch", "length"}
    for rules in (RULES, DECODE_RULES):
        assert {axis for axis, _ in rules} <= logical
        assert {name for _, names in rules for name in names} <= set(AXES)


def test_training_splits_over_fsdp_and_tensor_and_decoding_over_tensor():
    axes = ("layers", "embed", "kv_heads", "qkv", "head")
    assert spec(axes) == P(None, "fsdp", "tensor", None, None)
    assert spec(axes, DECODE_RULES) == P(None, None, "tensor", None, None)
    assert spec(("batch", None)) == P(("data", "fsdp"), None)


def test_an_indivisible_dimension_falls_back_to_the_longest_prefix_that_divides():
    assert spec(("embed", "kv_heads"), shape=(48, 3)) == P("fsdp", None)
    assert spec(("embed", "kv_heads"), shape=(47, 4)) == P(None, "tensor")
    assert spec(("batch",), shape=(6,)) == P("data")
    assert spec(("batch",), shape=(5,)) == P(None)


def test_a_mesh_axis_splits_one_dimension_only():
    assert spec(("vocab", "mlp"), shape=(8, 8)) == P("tensor", None)


def test_one_device_mesh_holds_whole_params(params):
    placed = jax.device_put(params, shardings(CONFIG, make_mesh()))
    jax.tree.map(np.testing.assert_array_equal, params, placed)


@pytest.mark.parametrize("sizes", [(3, 1, 64), (0, 1, 1), (-1, -1, 1), (-1, 7, 1), (-2, 1, 1)])
def test_meshes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match="mesh data="):
        make_mesh(*sizes)


@dataclasses.dataclass(frozen=True)
class Device:
    """What of a device says where it lies."""

    id: int
    platform: str
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    process_index: int = 0
    device_kind: str = "TPU v5"
    core_on_chip: int = 0


def test_part_of_the_devices_of_several_processes_is_refused():
    devices = jax.devices() * 8
    with pytest.raises(UserError, match=r"fsdp=4, tensor=1 has 4 of the 8 devices of 2 processes"):
        make_mesh(fsdp=4, devices=devices, processes=2)


def test_nodes_of_gpus_make_one_mesh_whose_last_axis_lies_within_a_node():
    devices = [Device(n, "gpu", slice_index=n // 8) for n in (*range(8, 16), *range(8))]
    mesh = make_mesh(data=-1, tensor=8, devices=devices)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 8}
    nodes = [[device.slice_index for device in row] for row in mesh.devices.reshape(2, 8)]
    assert nodes == [[0] * 8, [1] * 8]


def test_several_tpu_slices_are_refused():
    devices = [Device(n, "tpu", slice_index=n) for n in range(2)]
    with pytest.raises(UserError, match="devices of 2 TPU slices, and a run needs a single slice"):
        make_mesh(data=2, devices=devices)


def test_chips_that_are_no_block_of_a_slice_are_refused():
    places = [(x, y, 0) for y in range(2) for x in range(2)]
    devices = [Device(n, "tpu", coords=place) for n, place in enumerate(places)]
    with pytest.raises(UserError, match="has 3 chips that do not form a block of this TPU slice"):
        make_mesh(fsdp=3, devices=devices)


def slice_of(x, y, z, kind="TPU v5"):
    """Chips of a slice in JAX's order: hosts of 2 x 2 x 1 of them."""
    places = sorted(np.ndindex(x, y, z), key=lambda at: (at[2], at[1], at[0]))
    hosts = [(a // 2, b // 2, c) for a, b, c in places]
    order = list(dict.fromkeys(hosts))
    return [
        Device(number, "tpu", coords=place, process_index=order.index(host), device_kind=kind)
        for number, (place, host) in enumerate(zip(places, hosts, strict=True))
    ]


LARGE = {
    "v5p:8x8x8": slice_of(8, 8, 8),
    "v6e:8x8": slice_of(8, 8, 1, "TPU v6 lite"),
    "v6e:16x16": slice_of(16, 16, 1, "TPU v6 lite"),
}


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", LARGE)
def test_every_power_of_two_is_laid_over_a_large_slice(name, tensor, data):
    mesh = make_mesh(data, -1, tensor, LARGE[name], processes=len(LARGE[name]) // 4)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in LARGE[name]}
    groups = mesh.devices.reshape(-1, tensor)
    for group in groups:
        # Neighbours along the group are neighbours on the torus; also where the ring closes,
        # except that the ends of a whole axis are linked around the torus.
        at = np.array([d.coords for d in group])
        steps = np.abs(at - np.roll(at, 1, axis=0)).sum(1)
        whole = np.ptp(at, axis=0).max() + 1 == max(d.coords[0] for d in LARGE[name]) + 1
        assert (steps[1:] == 1).all()
        assert tensor == 1 or whole or steps[0] == 1
        # Those of a host follow each other, as an engine needs them.
        hosts = [d.process_index for d in group]
        assert sum(a != b for a, b in itertools.pairwise(hosts)) == len(set(hosts)) - 1
        assert len(set(hosts)) == max(1, tensor // 4) or whole
    # An engine of each size that a host has room for.
    for chips in (1, 2, 4):
        engines = groups_of(decode_mesh(mesh, chips), chips)
        assert all(len({d.process_index for d in engine}) == 1 for engine in engines)


def test_axes_lie_along_whole_axes_of_the_torus_where_they_can():
    mesh = make_mesh(1, 64, 8, LARGE["v5p:8x8x8"], processes=128)
    assert [d.coords for d in mesh.devices[0, 0]] == [(x, 0, 0) for x in range(8)]
    expected = jax.make_mesh((1, 64, 8), AXES, devices=LARGE["v5p:8x8x8"])
    assert (mesh.devices == expected.devices).all()


@pytest.mark.parametrize("sizes", [(1, 16, 4), (1, 64, 1), (2, 8, 4), (-1, 8, 2)])
def test_a_mesh_is_laid_over_rows_of_a_slice_between_which_others_make_rollouts(sizes):
    training, aside = split_devices(slice_of(4, 4, 8), 2)
    assert {d.coords[1] for d in aside} == {1, 3}
    mesh = make_mesh(*sizes, devices=training, processes=32)
    assert mesh.size == 64
    assert {d.id for d in mesh.devices.flat} == {d.id for d in training}
    # Along an axis of the mesh all chips lie in whole axes of the torus.
    for axis in range(3):
        row = np.moveaxis(mesh.devices, axis, 0)[:, 0, 0]
        extent = [len({d.coords[i] for d in row}) for i in range(3)]
        assert np.prod(extent) == len(row)


def test_one_chip_of_each_host_makes_a_mesh_and_three_do_not():
    training, aside = split_devices(slice_of(4, 4, 8), 3)
    assert (len(training), len(aside)) == (32, 96)
    assert make_mesh(fsdp=-1, tensor=2, devices=training, processes=32).size == 32
    training, _ = split_devices(slice_of(4, 4, 8), 1)
    with pytest.raises(UserError, match=r"choose mesh.rollout_devices so that whole rows"):
        make_mesh(fsdp=-1, devices=training, processes=32)


def test_each_process_sets_its_last_devices_aside():
    devices = [Device(n, "cpu", process_index=p) for n, p in enumerate((0, 1, 0, 1, 1, 0))]
    training, aside = split_devices(devices, 1)
    assert [d.id for d in training] == [0, 1, 2, 3]
    assert [d.id for d in aside] == [5, 4]
    assert split_devices(devices, 0) == (devices, [])
    assert [d.id for d in split_devices(devices, 2, (0, 0, 0, 1, 1, 1))[1]] == [1, 2, 4, 5]
    with pytest.raises(UserError, match="rollout_devices is 3, and a process has only 3: leave"):
        split_devices(devices, 3)


def test_devices_that_nobody_needs_for_rollouts_are_not_set_aside():
    with pytest.raises(UserError, match="rollout_devices is 1, and this run has no rollouts"):
        training_mesh(MeshConfig(rollout_devices=1))
    with pytest.raises(UserError, match="rollout_devices is 1, and a process has only 1: leave"):
        training_mesh(MeshConfig(rollout_devices=1), rollouts=True)


PROGRAM = """
import sys, jax, numpy as np
from coa_jax.errors import UserError
from coa_jax.model.api import load_model, save_model
from coa_jax.model.params import shardings
from coa_jax.parallel.mesh import DECODE_RULES, make_mesh
from coa_jax.parallel.placement import training_mesh
from coa_jax.parallel.config import MeshConfig
assert jax.device_count() == 8
try:
    training_mesh(MeshConfig(1, 7, 1, rollout_devices=2), rollouts=True)
except UserError as error:
    assert "needs 7 devices, and there are 6" in str(error), error
    assert "(beside 2 mesh.rollout_devices of each process)" in str(error), error
assert training_mesh(MeshConfig(2, -1, 1, 1, 2), rollouts=True).devices.shape == (2, 3, 1)
path, out = sys.argv[1:]
tokens = np.random.default_rng(0).integers(0, 384, (4, 33))
single = load_model(path)
expected = np.asarray(single(tokens))
for sizes in ((2, 2, 2), (1, 8, 1), (1, 1, 8), (-1, 1, 2)):
    mesh = make_mesh(*sizes)
    model = load_model(path, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, model.params, single.params)
    qkv = model.params["layers"]["attn"]["qkv"]["kernel"]
    if sizes == (2, 2, 2):
        assert qkv.addressable_shards[0].data.shape == (3, 24, 1, 4, 12), qkv.sharding
    actual = model(tokens)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < 1e-5, (sizes, error)
    decode = jax.device_put(model.params, shardings(model.config, mesh, DECODE_RULES))
    actual = model.replace(params=decode)(tokens)
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max(), sizes
save_model(model, out)
jax.tree.map(np.testing.assert_array_equal, load_model(out).params, single.params)
print("equal")
"""


@pytest.mark.slow
def test_sharded_forward_on_eight_devices_equals_one_device(params, tmp_path):
    from coa_jax.model.api import Model, save_model
    from tests.tiny_tokenizer import train_tokenizer

    save_model(Model(CONFIG, params, train_tokenizer(["the river"], 300)), tmp_path / "in")
    folders = str(tmp_path / "in"), str(tmp_path / "out")
    assert on_devices(8, "-c", PROGRAM, *folders) == ["equal"]
