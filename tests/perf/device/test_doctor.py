"""`doctor --device` finds planted faults and names them; what is right passes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.engine import programs
from coa_jax.model import decoder
from coa_jax.model.attention import causal, paged
from coa_jax.perf.device import attention, doctor, policy, speed
from coa_jax.perf.device.checks import Check, guarded, within

LENGTH = 70


def only(checks):
    """The verdict and the text of checks that must agree in both."""
    found = [(check.verdict, check.text.partition("suspected: ")[2]) for check in checks]
    assert len(set(found)) == 1, found
    return found[0]


def replaced(monkeypatch, kernels, name, change):
    """Puts a changed kernel in the place of a kernel."""
    right = kernels[name]
    monkeypatch.setitem(kernels, name, lambda *x, **options: change(right, *x, **options))


# --- kernels -------------------------------------------------------------------------------


def test_right_kernels_pass():
    for check in (*attention.causal_checks(LENGTH, ["cudnn"]), *attention.paged_checks(["xla"])):
        assert check.verdict == "pass", check


def test_a_wrong_scale_is_named(monkeypatch):
    def change(right, q, *others, **options):
        return right(q * 1.25, *others, **options)

    replaced(monkeypatch, causal._KERNELS, "cudnn", change)
    fault = "the scores are 1.25 times the right ones (wrong scale)"
    assert only(attention.causal_checks(LENGTH, ["cudnn"])) == ("FAIL", fault)


def test_a_causal_mask_that_is_off_by_one_is_named(monkeypatch):
    def shifted(right, q, k, v, segments, *, interpret):
        b, t, n, g, width = q.shape
        mask = jnp.tril(jnp.ones((t, t), bool), 1)[None, None]
        if segments is not None:
            mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
        out = jax.nn.dot_product_attention(
            q.reshape(b, t, n * g, width), k, v, mask=mask, scale=1.0
        )
        return out.reshape(q.shape)

    replaced(monkeypatch, causal._KERNELS, "cudnn", shifted)
    fault = "a token sees the token after it (mask off by one)"
    assert only(attention.causal_checks(LENGTH, ["cudnn"])) == ("FAIL", fault)


def test_a_gradient_with_a_wrong_sign_is_named(monkeypatch):
    @jax.custom_vjp
    def negated(x):
        return x

    negated.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    def change(right, q, k, v, segments, **options):
        return right(q, negated(k), v, segments, **options)

    replaced(monkeypatch, causal._KERNELS, "cudnn", change)
    fault = "the gradient of k is -1 times the right one (wrong sign)"
    assert only(attention.causal_checks(LENGTH, ["cudnn"])) == ("FAIL", fault)


def test_a_dropped_page_and_a_wrong_length_are_named(monkeypatch):
    def change(right, q, table, lengths, keys, values, **options):
        if q.shape[1] > 1:
            return right(q, table, lengths - 1, keys, values, **options)
        # The kernel stops before the last page of the longest sequence.
        longest = table.shape[1] * keys.shape[2]
        lengths = jnp.where(lengths == longest, longest - keys.shape[2], lengths)
        return right(q, table, lengths, keys, values, **options)

    replaced(monkeypatch, paged._KERNELS, "pallas_gpu", change)
    decode, extend = attention.paged_checks(["pallas_gpu"])
    assert (decode.verdict, extend.verdict) == ("FAIL", "FAIL")
    assert decode.text.endswith("suspected: page 9 of 9 of a sequence is dropped")
    fault = "suspected: a token does not see itself (length off by one)"
    assert extend.text.endswith(fault)


def test_a_fault_without_a_name_fails_all_the_same(monkeypatch):
    def change(right, q, k, v, segments, **options):
        return right(q, k, v, segments, **options) + 0.01

    replaced(monkeypatch, causal._KERNELS, "cudnn", change)
    assert only(attention.causal_checks(LENGTH, ["cudnn"])) == ("FAIL", "")


# --- the policy ----------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A policy of one layer, and programs that are traced anew."""
    monkeypatch.setattr(policy, "MODEL", dataclasses.replace(policy.MODEL, num_layers=1))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_sampler_whose_logps_lack_the_temperature_is_named(monkeypatch):
    right = programs.sample

    def sample(logits, keys, positions, temperature, *others, **options):
        tokens, _ = right(logits, keys, positions, temperature, *others, **options)
        logps = jax.nn.log_softmax(logits)
        return tokens, jnp.take_along_axis(logps, tokens[:, None], 1)[:, 0]

    monkeypatch.setattr(programs, "sample", sample)
    check, _ = policy.gap(jax.device_put(policy.sharp_params()), *next(policy.computes()))
    assert check.verdict == "FAIL"
    assert check.text.endswith("suspected: the sampler's log-probabilities lack the temperature")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_wrong_position_of_decoding_is_named(monkeypatch):
    right = decoder.rope_tables

    def rope_tables(config, positions):
        return right(config, positions + (positions.shape[1] == 1))

    monkeypatch.setattr(decoder, "rope_tables", rope_tables)
    check, _ = policy.gap(jax.device_put(policy.sharp_params()), *next(policy.computes()))
    assert check.verdict == "FAIL"
    fault = "decoding rotates queries and keys by one position too many"
    assert check.text.endswith(f"suspected: {fault}")


# --- the report ----------------------------------------------------------------------------


def test_a_value_that_is_no_number_fails():
    assert within("g", "n", {"values": float("nan")}, {"values": 1.0}).verdict == "FAIL"


def test_an_exception_is_a_failed_check_and_the_report_goes_on(monkeypatch, tmp_path, capsys):
    def broken():
        yield Check("kernels", "first", "pass", "fine", {"values": np.float64(0.5)})
        raise RuntimeError("Mosaic failed to compile\nfor a long reason")

    monkeypatch.setattr(attention, "all_checks", broken)
    monkeypatch.setattr(policy, "all_checks", lambda: iter([Check("p", "second", "pass", "fine")]))
    monkeypatch.setattr("coa_jax.perf.device.speed.all_checks", lambda: iter(()))
    out = tmp_path / "report.json"
    assert doctor.main(["--device", f"--out={out}"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  the checks: stopped by RuntimeError: Mosaic failed to compile\n" in said
    assert said.splitlines()[-2].startswith("2 pass, 1 FAIL in ")
    report = json.loads(out.read_text())
    assert [check["verdict"] for check in report["checks"]] == ["pass", "FAIL", "pass"]
    assert report["ok"] is False
    assert "for a long reason" in report["checks"][1]["traceback"]
    assert list(guarded("g", "n", lambda: [])) == []


def test_a_kernel_that_cannot_be_compiled_does_not_stop_the_checks_of_the_others(monkeypatch):
    def run(length, names):
        if names == ["splash"]:
            raise RuntimeError("Mosaic failed to compile")
        yield Check("kernels", f"causal {names[0]}, {length} tokens", "pass", "fine")

    monkeypatch.setattr(attention, "causal_checks", run)
    monkeypatch.setattr(attention, "paged_checks", lambda names: iter(()))
    found = {check.name: check.verdict for check in attention.all_checks()}
    assert found.pop("causal splash, 201 tokens") == "FAIL"
    assert found and set(found.values()) == {"pass"}


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(tmp_path, capsys):
    assert doctor.main(["--device", f"--out={tmp_path}/none/report.json"]) == 2
    assert "give a file in a directory that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("used", "seconds", "verdicts"),
    [
        (None, 1.5, ["skip", "pass"]),
        (0.9e9, 1.5, ["pass", "pass"]),
        (1.2e9, 5.0, ["look", "look"]),
        (0.9e9, 0.5, ["pass", "look"]),  # faster than all limits: the prediction is wrong
    ],
)
def test_memory_and_time_far_from_the_prediction_are_to_be_looked_at(used, seconds, verdicts):
    roofline = {"step_s": 1.0, "serial_s": 2.0}
    predicted = {"programs": [{"bytes_per_chip": {"total": 10**9}, "roofline": roofline}]}
    step = {"step_s": {"median": seconds}, "share_of_peak": 0.5}
    assert [check.verdict for check in speed._compare(step, used, predicted)] == verdicts
