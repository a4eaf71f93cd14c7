"""A Flax NNX module of the user's own trains by SFT and gives log-probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coa_jax
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.errors import UserError
from coa_jax.tasks.prompts import load_prompt
from coa_jax.train.step import train_step


class Recurrent(nnx.Module):
    """A language model with a GRU cell, which knows nothing of coa_jax."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.cell = nnx.GRUCell(width, width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        inputs = self.embed(jnp.asarray(tokens)).swapaxes(0, 1)
        start = jnp.zeros(inputs.shape[1:])
        # A new function for each call, because JAX reuses the trace of an old one.
        _, hidden = jax.lax.scan(lambda carry, x: self.cell(carry, x), start, inputs)
        return self.head(hidden.swapaxes(0, 1))


RECORDS = [
    DistilledRecord(str(n), f"Say {n}.", "turns", (str(n),), (("policy", f"It is {n}."),), str(n))
    for n in range(8)
]
SETTINGS = {"batch_size": 8, "optimizer": {"learning_rate": 1e-2, "total_steps": 30}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    sizes |= {"head_dim": 4, "induction": False}
    path = coa_jax.create_policy(tmp_path_factory.mktemp("base"), RECORDS, **sizes)
    return coa_jax.load_tokenizer(path)


def policy_of(tokenizer):
    return coa_jax.Foreign(Recurrent(len(tokenizer), 32, nnx.Rngs(0)), tokenizer)


def test_a_module_trains_as_a_loop_in_optax_does_and_is_restored(tokenizer, tmp_path):
    policy = policy_of(tokenizer)
    run = coa_jax.train_sft(policy, tmp_path / "run", data=RECORDS, **SETTINGS)
    assert run.metrics[-1]["loss"] < 0.3 * run.metrics[0]["loss"]

    # The first loss is that of the untrained module, by its own logits and one row at a time.
    prompt = load_prompt("brief")
    fresh, total, count = policy_of(tokenizer), 0.0, 0.0
    for record in RECORDS:
        example = coa_jax.record_example(tokenizer, record, prompt)
        logits = jax.nn.log_softmax(fresh.module(example.tokens[None]))[0]
        chosen = logits[np.arange(len(example.tokens) - 1), example.tokens[1:]]
        total -= float((chosen * example.mask[1:]).sum())
        count += float(example.mask[1:].sum())
    assert run.metrics[0]["loss"] == pytest.approx(total / count, rel=1e-4)

    (batch,) = coa_jax.split_rows(coa_jax.pack([example], 128), 1)
    trained = coa_jax.log_probs(policy, batch)
    assert float((trained * batch.mask).sum()) > float(
        (coa_jax.log_probs(fresh, batch) * batch.mask).sum()
    )
    fresh.restore(run.model)
    np.testing.assert_array_equal(coa_jax.log_probs(fresh, batch), trained)
    with pytest.raises(UserError, match="a module of your own cannot decode"):
        _ = run.policy


def test_an_interrupted_run_continues_to_the_same_parameters(tokenizer, tmp_path, monkeypatch):
    settings = {**SETTINGS, "batch_size": 3, "checkpoint_every": 5}
    settings["optimizer"] = {"learning_rate": 1e-2, "total_steps": 12}
    whole, resumed = policy_of(tokenizer), policy_of(tokenizer)
    coa_jax.train_sft(whole, tmp_path / "whole", data=RECORDS, **settings)
    calls = 0

    def killed(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return train_step(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("coa_jax.train.fit.train_step", killed)
        coa_jax.train_sft(resumed, tmp_path / "parts", data=RECORDS, **settings)
    resumed = policy_of(tokenizer)
    run = coa_jax.train_sft(resumed, tmp_path / "parts", data=RECORDS, **settings)
    assert [row["step"] for row in run.metrics] == list(range(1, 13))
    for mine, other in zip(*map(parameters, (whole, resumed)), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_best_checkpoint_of_a_module_is_kept(tokenizer, tmp_path):
    optimizer = {"learning_rate": 10.0, "total_steps": 4}  # the loss only rises
    run = coa_jax.train_sft(
        policy_of(tokenizer), tmp_path / "run", data=RECORDS, batch_size=8, optimizer=optimizer,
        checkpoint_every=1, keep_last=1, keep_best="loss",
    )  # fmt: skip
    losses = [row["loss"] for row in run.metrics]
    best = 1 + losses.index(min(losses))
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints" / "sft").iterdir()}
    assert best < 4 and kept == {best, 4}


def test_the_passes_over_the_data_leave_out_what_is_too_long(tokenizer, tmp_path):
    long = DistilledRecord("9", "Say.", "turns", ("9",), (("policy", "It is 9. " * 50),), "9")
    data, sizes = [*RECORDS, long], {"batch_size": 8, "row_length": 128}
    run = coa_jax.train_sft(policy_of(tokenizer), tmp_path / "run", data=data, **sizes)
    assert run.metrics[-1]["epoch"] == 3


def test_an_interruption_leaves_the_module_whole(tokenizer, tmp_path, monkeypatch):
    policy = policy_of(tokenizer)
    before = list(map(np.array, parameters(policy)))

    def killed(*args, **kwargs):
        train_step(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr("coa_jax.train.fit.train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        coa_jax.train_sft(policy, tmp_path / "run", data=RECORDS, **SETTINGS)
    for mine, other in zip(parameters(policy), before, strict=True):
        np.testing.assert_array_equal(mine, other)


def parameters(policy):
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(policy.module, nnx.Param)))


def test_what_a_module_cannot_do_is_refused_in_one_line(tokenizer, tmp_path):
    policy = policy_of(tokenizer)
    with pytest.raises(UserError, match=r"lora\.rank is 4: it needs a model of coa_jax"):
        coa_jax.train_sft(policy, tmp_path / "a", data=RECORDS, lora={"rank": 4})
    with pytest.raises(UserError, match=r"mesh\.fsdp is 2: .* one device"):
        coa_jax.train_sft(policy, tmp_path / "b", data=RECORDS, mesh={"fsdp": 2})
    policy.module.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"module\.drop has dropout.*module\.eval\(\)"):
        coa_jax.train_sft(policy, tmp_path / "c", data=RECORDS)
    with pytest.raises(UserError, match=r"module is function; give a flax\.nnx\.Module"):
        coa_jax.Foreign(lambda tokens: tokens, tokenizer)
    with pytest.raises(UserError, match=r"module\.safetensors is missing"):
        policy.restore(tmp_path)
    example = coa_jax.record_example(tokenizer, RECORDS[0], load_prompt("brief"))
    with pytest.raises(UserError, match="a row has several sequences"):
        coa_jax.log_probs(policy, coa_jax.pack([example, example], 256))
