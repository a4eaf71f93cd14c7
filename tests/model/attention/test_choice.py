"""`auto` selects the best kernel that can run and logs it once; other kernels are refused."""

from __future__ import annotations

import dataclasses

import pytest

from coa_jax.errors import UserError
from coa_jax.model.attention import choice
from coa_jax.model.attention.choice import Case, resolve
from coa_jax.model.compute import training_compute
from coa_jax.model.config import ModelConfig

CASE = Case("tpu", "bfloat16", num_kv_heads=8, num_groups=4, head_dim=128, page_size=32)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("causal", {"platform": "cpu"}, "xla"),
        ("causal", {"platform": "cuda", "capability": 9.0}, "pallas_gpu"),
        ("causal", {"platform": "cuda", "capability": 8.0, "head_dim": 192}, "pallas_gpu"),
        ("causal", {"platform": "cuda", "capability": 7.5}, "xla"),
        ("causal", {"platform": "rocm"}, "xla"),
        ("causal", {"platform": "tpu"}, "splash"),
        ("causal", {"platform": "tpu", "head_dim": 64}, "splash"),
        ("causal", {"platform": "tpu", "dtype": "float32"}, "xla"),
        ("paged", {"platform": "cpu"}, "xla"),
        ("paged", {"platform": "cuda", "capability": 9.0}, "pallas_gpu"),
        ("paged", {"platform": "cuda", "capability": 9.0, "page_size": 24}, "xla"),
        ("paged", {"platform": "cuda", "capability": 8.9, "page_size": 128}, "pallas_gpu"),
        ("paged", {"platform": "cuda", "capability": 9.0, "page_size": 256}, "pallas_gpu"),
        ("paged", {"platform": "cuda", "capability": 8.0, "page_size": 256}, "xla"),
        ("paged", {"platform": "tpu"}, "ragged_paged"),
        ("paged", {"platform": "tpu", "head_dim": 64}, "xla"),
        ("paged", {"platform": "tpu", "num_kv_heads": 3}, "xla"),
        ("causal", {"platform": "tpu", "windowed": True}, "xla"),
        ("causal", {"platform": "cuda", "capability": 9.0, "windowed": True}, "xla"),
        ("paged", {"platform": "tpu", "windowed": True}, "ragged_paged"),
        ("paged", {"platform": "cuda", "capability": 9.0, "windowed": True}, "xla"),
    ],
)
def test_auto_takes_the_best_that_can_run(kind, changes, expected):
    assert resolve(kind, "auto", dataclasses.replace(CASE, **changes)) == expected


def test_the_choice_is_printed_once_with_what_was_passed_over(capsys):
    choice._announce.cache_clear()
    case = dataclasses.replace(CASE, head_dim=64)
    for _ in range(3):
        resolve("paged", "auto", case)
    assert capsys.readouterr().err.splitlines() == [
        "paged attention: xla on tpu in bfloat16 (ragged_paged: head_dim must be 128, it is 64)"
    ]


def test_the_printed_line_has_no_reason_against_kernels_that_are_never_preferred(
    monkeypatch, capsys
):
    monkeypatch.setitem(choice._KERNELS["causal"], "tokamax", ("cuda", "no_such_package.kernels"))
    choice._announce.cache_clear()
    resolve("causal", "auto", dataclasses.replace(CASE, platform="cuda", capability=9.0))
    assert capsys.readouterr().err == "causal attention: pallas_gpu on cuda in bfloat16\n"


@pytest.mark.parametrize(
    ("wanted", "changes", "reason"),
    [
        ("splash", {"platform": "cpu"}, "needs tpu"),
        ("cudnn", {"platform": "cpu"}, "needs cuda"),
        ("splash", {"dtype": "float32"}, "multiplies in bfloat16, dtype is float32"),
        ("cudnn", {"platform": "cuda", "capability": 7.0}, "capability 8.0"),
        ("tokamax", {"platform": "tpu"}, "needs cuda"),
        ("splash", {"windowed": True}, "it has no sliding windows"),
    ],
)
def test_an_explicit_choice_that_cannot_run_is_refused(wanted, changes, reason):
    case = dataclasses.replace(CASE, **changes)
    with pytest.raises(UserError, match=reason) as refusal:
        resolve("causal", wanted, case, "config.attention")
    assert str(refusal.value).startswith(f"config.attention is '{wanted}'")
    assert "use auto or one of" in str(refusal.value)
    assert "xla" in str(refusal.value)


@pytest.mark.parametrize("capability", [8.0, 10.0])
def test_tokamax_is_for_hopper(monkeypatch, capability):
    monkeypatch.setitem(choice._KERNELS["causal"], "tokamax", ("cuda", "json"))  # installed
    cuda = dataclasses.replace(CASE, platform="cuda", capability=9.0)
    assert resolve("causal", "tokamax", cuda) == "tokamax"
    with pytest.raises(UserError, match="capability 9, this device has"):
        resolve("causal", "tokamax", dataclasses.replace(cuda, capability=capability))


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(choice._KERNELS["causal"], "tokamax", ("cuda", "no_such_package.kernels"))
    with pytest.raises(UserError, match=r"tokamax is not installed.*tokamax"):
        resolve("causal", "tokamax", dataclasses.replace(CASE, platform="cuda", capability=9.0))


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match="give one of auto, xla, splash, pallas_gpu, cudnn"):
        resolve("causal", "flash", CASE)


def test_a_kernel_that_this_jax_does_not_have_is_refused(monkeypatch):
    missing = {"splash": ("tpu", "jax.experimental.pallas.ops.tpu.no_such_kernel")}
    monkeypatch.setitem(choice._KERNELS, "causal", missing)
    with pytest.raises(
        UserError, match=r"has no jax\.experimental\.pallas\.ops\.tpu\.no_such_kernel"
    ):
        resolve("causal", "splash", CASE)
    assert resolve("causal", "auto", CASE) == "xla"


def test_the_setting_of_a_run_is_resolved_for_the_machine_it_runs_on():
    model = ModelConfig("llama", 64, 32, 64, 1, 4, 2, 16)
    assert training_compute(model, dtype="bfloat16", attention="xla").attention == "xla"
    with pytest.raises(UserError, match=r"config\.attention is 'splash', which cannot run on cpu"):
        training_compute(model, dtype="bfloat16", attention="splash")
