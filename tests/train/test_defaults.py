"""What a run chooses that its config leaves to the model, the data and the machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from coa_jax.engine.memory import engine_memory
from coa_jax.model.architectures import architecture_of
from coa_jax.model.config import LoraConfig
from coa_jax.parallel.slices import parse_slice
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.train.command import with_rank
from coa_jax.train.config import DPOConfig, SFTConfig
from coa_jax.train.defaults import Machine, completed, completed_for, with_adapters, with_defaults
from coa_jax.train.rl_config import RLConfig

CPU, H100 = Machine("cpu", 1, 4 * 10**9), Machine("gpu", 1, 79 * 10**9)
V5E, V5P = Machine("tpu", 8, 16 * 10**9), Machine("tpu", 64, 95 * 10**9)


def rl(rank: int | None = 0, **changes) -> RLConfig:
    """Settings of a run; ``rank`` None leaves the adapters to the run."""
    adapters = {} if rank is None else {"lora": {"rank": rank}}
    values = with_defaults("rl", {"model": "m", "tasks": "t", **adapters, **changes})
    del values["tools"]
    return build_config(RLConfig, values)


def model(name: str, rank: int = 0):
    return dataclasses.replace(architecture_of(name)[1], lora=LoraConfig(rank=rank))


@pytest.mark.parametrize(
    ("name", "rank", "machine"),
    [
        ("smollm2-135m", 0, CPU),
        ("qwen2.5-0.5b", 0, H100),
        ("qwen2.5-1.5b", 0, H100),
        ("qwen2.5-7b", 32, H100),
        ("qwen2.5-1.5b", 0, V5E),
        ("qwen2.5-7b", 32, V5E),
        ("qwen2.5-7b", 0, V5P),
    ],
)
def test_an_engine_fits_beside_the_trained_parameters(name, rank, machine):
    of_run, shapes = rl(rank), model(name, rank)
    chosen = completed(of_run, shapes, of_run.longest, machine=machine)
    assert chosen.row_length == chosen.rollout.max_tokens == chosen.engine.max_length
    assert chosen.rows % machine.devices == 0  # every device has rows
    chips = max(1, chosen.mesh.decode_tensor)
    of_engine = engine_memory(shapes, chosen.engine, chips)
    billions = {"smollm2-135m": 0.135, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54}.get(name, 7.6)
    of_training = billions * 10**9 * (4 if rank else 16) / machine.devices
    assert of_engine.parameters + of_engine.cache + of_training < machine.free
    assert chosen.engine.slots >= 2


ON_SLICES = {  # name: (parameters in billions, rank on one H100, v5e-8 and 64 chips of v5p)
    "qwen3-0.6b": (0.6, 0, 0, 0),
    "qwen2.5-1.5b": (1.54, 0, 0, 0),
    "qwen2.5-3b": (3.09, 32, 0, 0),
    "qwen3-4b": (4.02, 32, 0, 0),
    "qwen2.5-7b": (7.62, 32, 32, 0),
}


@pytest.mark.parametrize(
    ("place", "topology", "devices", "of_process", "gigabytes"),
    # JAX takes 75 % of a GPU.
    [(0, "gpu:1xh100", 1, 1, 60), (1, "v5e:2x4", 8, 4, 17.1), (2, "v5p:4x4x4", 64, 4, 102)],
)
@pytest.mark.parametrize("name", ON_SLICES)
def test_a_run_without_settings_fits(name, place, topology, devices, of_process, gigabytes):
    billions, *ranks = ON_SLICES[name]
    chosen = completed_for(rl(None), model(name), parse_slice(topology), devices)
    assert chosen.lora.rank == ranks[place]
    chips = max(1, chosen.mesh.decode_tensor)
    assert of_process % chips == 0
    # Parameters, two moments and a reference while engines decode, and the frozen base of adapters.
    kept = billions * (2 if chosen.lora.rank else 16) / devices
    of_engine = engine_memory(model(name), chosen.engine, chips)
    assert kept + (of_engine.parameters + of_engine.cache) / 1e9 < 0.9 * gigabytes
    assert kept * (1 if chosen.lora.rank else 20 / 16) < 0.9 * gigabytes  # and the gradients
    assert chosen.engine.slots >= 2
    assert chosen.rows % devices == 0


def test_rows_take_what_the_compiler_of_gpus_takes():
    """One row of 7B needs 42.6 of 60 GB (`coa-jax aot`)."""
    chosen = completed_for(rl(None), model("qwen2.5-7b"), parse_slice("gpu:1xh100"), 1)
    assert (chosen.rows, chosen.row_length) == (1, 2048)


@pytest.mark.parametrize(("aside", "chips"), [(0, 4), (2, 2)])
def test_an_engine_spans_no_processes(aside, chips):
    of_run = rl(mesh={"fsdp": -1, "rollout_devices": aside})  # which is too large for this slice
    chosen = completed_for(of_run, model("qwen2.5-7b"), parse_slice("v5e:2x4"), 8)
    assert chosen.mesh.decode_tensor == chips


def test_a_choice_of_adapters_is_printed_with_the_setting_that_changes_it(capsys):
    machine = H100._replace(free=60 * 10**9)
    for rank, then in ((None, 32), (0, 0), (8, 8)):
        assert with_adapters(rl(rank), model("qwen2.5-7b"), machine).lora.rank == then
        told = capsys.readouterr().out
        assert ("lora.rank 32" in told and "--config.lora.rank=0" in told) == (rank is None)
    assert with_adapters(rl(None), model("qwen2.5-1.5b"), machine) == rl(0)
    assert capsys.readouterr().out == ""


def test_the_reference_of_preferences_needs_memory_too():
    given = {"model": "m", "lora": LoraConfig(rank=-1)}
    traces = {"traces": "t", "phase": "rl", "beta": 0.1, "min_gap": 0.5, "per_task": 1}
    one, other = SFTConfig(data="d", **given), DPOConfig(**traces, **given)
    room = Machine("gpu", 1, 33 * 10**9)  # of 1.5 billion parameters, a state takes 24.7 or 30.9 GB
    ranks = [with_adapters(each, model("qwen2.5-1.5b"), room).lora.rank for each in (one, other)]
    assert ranks == [0, 32]


def test_a_run_keeps_the_adapters_that_it_began_with(tmp_path):
    (tmp_path / "config.json").write_text('{"lora": {"rank": 8}}')
    assert with_rank(rl(None), tmp_path, model("smollm2-135m")).lora.rank == 8
    assert with_rank(rl(None), tmp_path / "new", model("smollm2-135m")).lora.rank == 0


def test_a_gpu_that_is_not_here_offers_the_share_of_its_memory_that_jax_takes(monkeypatch):
    where, config, policy = parse_slice("gpu:1xh100"), rl(), model("qwen2.5-1.5b")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    for share, free in (("", 60 * 10**9), ("0.95", 76 * 10**9)):
        if share:
            monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
        chosen = completed_for(config, policy, where, 1)
        assert chosen == completed(config, policy, config.longest, 1, Machine("gpu", 1, free))


@pytest.mark.parametrize(
    ("path", "topology", "devices", "slots"),
    [
        # 64 tasks x 8 samples; engines of 4 chips: 16 on 64 chips, 32 on 128 chips.
        ("configs/rl/web.py:7b", "v5p:4x4x4", 64, 32),
        ("configs/rl/web.py:32b", "v5p:4x4x8", 128, 16),
    ],
)
def test_a_step_of_the_papers_recipes_is_decoded_in_one_wave(path, topology, devices, slots):
    settings = load_config(path).to_dict()
    del settings["tools"]
    of_run = build_config(RLConfig, settings)
    _, shapes = architecture_of(of_run.model)
    chosen = completed_for(of_run, shapes, parse_slice(topology), devices)
    assert (chosen.engine.slots, chosen.engine.pages) == (slots, 0)
    assert chosen == dataclasses.replace(of_run, engine=chosen.engine)


def test_slots_for_which_memory_is_short_share_the_pages_that_it_holds():
    sizes = {"groups": 64, "group_size": 8, "rows": 64, "mesh": {"decode_tensor": 4}}
    sizes |= {"row_length": 32_768, "rollout": {"max_tokens": 32_768}}
    shapes, pages = model("qwen2.5-7b"), []
    for stale in (0, 1):
        of_run = rl(**sizes, max_staleness=stale)
        chosen = completed(of_run, shapes, of_run.longest, machine=V5E._replace(devices=64)).engine
        assert chosen.slots == 32
        assert chosen.pages_per_slot <= chosen.pages < 32 * chosen.pages_per_slot
        taken = engine_memory(shapes, chosen, 4)
        assert taken.parameters + taken.cache < 0.85 * V5E.free - 16 * 7.6e9 / 64
        pages.append(chosen.pages)
    assert pages[1] < pages[0]  # updates need memory beside an engine that goes on


def test_slots_that_are_given_share_a_pool_too():
    sizes = {"rows": 64, "row_length": 32_768, "rollout": {"max_tokens": 32_768}}
    of_run = rl(32, **sizes, groups=64, group_size=8, engine={"slots": 512})
    chosen = completed_for(of_run, model("qwen2.5-7b"), parse_slice("gpu:1xh100"), 1).engine
    assert (chosen.slots, chosen.max_length) == (512, 32_768)
    assert 2 * chosen.pages_per_slot < chosen.pages < 64 * chosen.pages_per_slot


def test_an_engine_gets_the_memory_that_a_split_over_fsdp_or_tensor_leaves():
    sizes = {"groups": 64, "group_size": 8, "rows": 64, "row_length": 32_768}
    sizes |= {"rollout": {"max_tokens": 32_768}}
    pages = {}
    for mesh in ((1, 8, 1), (1, 4, 2), (1, 4, -1), (2, 4, 1)):
        axes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True), decode_tensor=1)
        of_run = rl(**sizes, mesh=axes)
        machine = H100._replace(free=60 * 10**9, devices=8)
        chosen = completed(of_run, model("qwen2.5-7b"), of_run.longest, machine=machine).engine
        pages[mesh] = chosen.pages
    assert pages[1, 8, 1] == pages[1, 4, 2] == pages[1, 4, -1] > 2 * pages[2, 4, 1] > 0


def test_rematerialisation_is_chosen_for_all_rows_of_a_device():
    def chosen(rows: int, machine: Machine) -> str:
        of_run = rl(rows=rows, row_length=4096, engine={"slots": 4})
        return completed(of_run, model("qwen2.5-1.5b"), 4096, machine=machine).remat

    assert chosen(1, H100) == chosen(8, H100._replace(devices=8)) == "none"
    assert chosen(8, H100) == "full"


def test_a_setting_that_is_given_stays():
    given = {"rows": 2, "row_length": 4096, "dtype": "float32", "remat": "full"}
    engine = {"slots": 4, "max_length": 2048, "dtype": "float32"}
    optimizer = {"learning_rate": 3e-4, "total_steps": 7}
    of_run = rl(**given, engine=engine, optimizer=optimizer)
    chosen = completed(of_run, model("qwen2.5-0.5b"), of_run.longest, machine=H100)
    assert chosen == of_run


def test_fine_tuning_makes_three_passes_over_rows_of_the_longest_example():
    values = with_defaults("sft", {"model": "m", "data": "d", "batch_size": 8, "lora": {"rank": 0}})
    of_run = build_config(SFTConfig, values)
    chosen = completed(of_run, model("smollm2-135m"), longest=700, examples=100, machine=CPU)
    assert (chosen.row_length, chosen.optimizer.total_steps) == (704, 38)
    gpu = completed(of_run, model("smollm2-135m"), 700, 100, Machine("gpu", 1, 80 * 10**9))
    assert gpu.row_length == 768
    adapters = completed(of_run, model("smollm2-135m", 8), longest=700, examples=100, machine=CPU)
    assert adapters.optimizer.learning_rate > chosen.optimizer.learning_rate > 0


@pytest.mark.parametrize(
    ("name", "rank", "rates"),
    [
        ("qwen2.5-7b", 0, (1e-5, 1e-6)),
        ("qwen2.5-7b", 32, (2e-4, 5e-5)),
        ("smollm2-135m", 0, (7.4e-5, 7.4e-6)),
        ("smollm2-135m", 8, (1.5e-3, 3.7e-4)),
        ("tiny", 0, (1e-3, 1.6e-4)),
    ],
)
def test_smaller_models_learn_at_higher_rates(name, rank, rates):
    """Configs of published runs: adapters for 135M have 2e-3 in SFT, and 3e-4 and 1e-3 in RL."""
    given = {"model": "m", "data": "d", "lora": {"rank": rank}}
    sft = build_config(SFTConfig, with_defaults("sft", given))
    of_rl, shapes = rl(rank), model(name, rank)
    chosen = (
        completed(sft, shapes, longest=512, examples=100, machine=H100),
        completed(of_rl, shapes, of_rl.longest, machine=H100),
    )
    assert tuple(each.optimizer.learning_rate for each in chosen) == rates


def test_preferences_keep_a_low_rate_in_small_models():
    traces = {"traces": "t", "phase": "rl", "beta": 0.1, "min_gap": 0.5, "per_task": 1}
    of_run = DPOConfig(**traces, model="m")
    assert completed(of_run, model("tiny"), 512, 10, H100).optimizer.learning_rate == 1e-5


def test_all_processes_choose_by_the_least_free_memory(monkeypatch):
    """With rows of their own, they would run programs of different shapes, and never meet."""
    monkeypatch.setattr("coa_jax.engine.memory.free_memory", lambda device: 64 * 10**9)
    monkeypatch.setattr("coa_jax.parallel.processes.all_gather", lambda mine, *_: [mine, 10**9])
    assert Machine.here().free == 10**9
    given = {"model": "m", "data": "d", "dtype": "bfloat16", "lora": {"rank": 0}}
    of_run = build_config(SFTConfig, with_defaults("sft", given))
    shapes = model("smollm2-135m")
    chosen = [completed(of_run, shapes, 128, 100, CPU._replace(free=x * 10**9)) for x in (4, 6)]
    assert [each.rows for each in chosen] == [2, 8]


def test_a_config_is_completed_without_jax():
    """So that a wrong setting is answered before JAX is loaded."""
    code = (
        "import sys; from coa_jax.train.defaults import with_defaults\n"
        "with_defaults('rl', {}), with_defaults('sft', {}); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_goes_on_with_the_sizes_with_which_it_began(tmp_path):
    def chosen(gigabytes: int, devices: int = 1, run=tmp_path, **changes) -> tuple[int, str]:
        machine = Machine("gpu", devices, gigabytes * 10**9)
        of_run, shapes = rl(row_length=4096, **changes), model("qwen2.5-1.5b")
        config = completed(of_run, shapes, 4096, machine=machine, run=run)
        return config.rows, config.remat

    began = chosen(79)
    assert chosen(32, run=None) != began
    assert chosen(32) == chosen(79) == began
    assert chosen(32, rows=1, remat="full") == (1, "full")  # settings that are given stay
    assert [file.name for file in tmp_path.iterdir()] == ["chosen-rl.json"]
    noted = (tmp_path / "chosen-rl.json").read_text()
    of_run, shapes, machine = rl(), model("qwen2.5-1.5b"), Machine("gpu", 2, 32 * 10**9)
    completed(of_run, shapes, 4096, machine=machine, run=tmp_path, note=False)  # a replay
    assert (tmp_path / "chosen-rl.json").read_text() == noted
    on_two = chosen(32, devices=2)
    assert on_two != began
    assert chosen(79, devices=2) == on_two
