"""Decoding equals transformers, and no bookkeeping of slots changes what is decoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import init_params

MODEL = ModelConfig("qwen3", 199, 48, 96, 3, 6, 2, 16, qk_norm=True)
PARAMS = init_params(MODEL, jax.random.key(3))
SHAPES = EngineConfig(slots=4, max_length=96, chunk=8, extend_rows=2, extend_buckets=(8, 32))
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 17, 3, 120, 44, 9, 9, 61, 2, 77, 31]


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


@jax.jit
def full_logits(tokens):
    hidden, _ = forward(PARAMS, MODEL, tokens, jnp.arange(tokens.shape[1])[None])
    return unembed(PARAMS, MODEL, hidden)[0]


def reference_logits(ids):
    # Attention is causal, so padding at the end changes nothing before it.
    padded = np.zeros((1, SHAPES.max_length), np.int32)
    padded[0, : len(ids)] = ids
    return full_logits(padded)[: len(ids)]


def reference_greedy(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(np.asarray(reference_logits(ids)[-1]))))
    return ids[len(prompt) :]


def test_greedy_tokens_equal_transformers_generate(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from coa_jax.model.api import load_model
    from coa_jax.model.bpe import train_bpe

    torch.manual_seed(0)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).eval()
    reference.save_pretrained(tmp_path)
    train_bpe(["some words for a tokenizer"], 300, tmp_path)
    model = load_model(tmp_path)
    engine = Engine(model.params, model.config, SHAPES)
    prompts = np.random.default_rng(1).integers(3, 300, size=(4, 12)).tolist()
    engine.extend([(slot, 0, prompt) for slot, prompt in enumerate(prompts)])
    for slot, prompt in enumerate(prompts):
        begin(engine, slot, prompt, limit=len(prompt) + 30)
    tokens, _ = run(engine, range(4))
    for slot, prompt in enumerate(prompts):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=30,
            min_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert tokens[slot] == expected


@pytest.mark.parametrize("chunk", [1, 3, 32])
@pytest.mark.parametrize("slots", [1, 7])
def test_samples_do_not_depend_on_chunk_size_or_number_of_slots(chunk, slots):
    def sampled(engine, slot):
        engine.extend([(slot, 0, PROMPT)])
        begin(engine, slot, PROMPT, 60, SamplingParams(), (4, 5, 6))
        tokens, logps = run(engine, [slot])
        return tokens[slot], logps[slot]

    expected, expected_logps = sampled(make(), 2)
    tokens, logps = sampled(make(chunk=chunk, slots=slots), slots - 1)
    assert tokens == expected
    np.testing.assert_allclose(logps, expected_logps, atol=1e-5)


def test_log_probabilities_are_those_of_the_full_forward_pass():
    engine = make()
    engine.extend([(0, 0, PROMPT)])
    begin(engine, 0, PROMPT, 70, SamplingParams(temperature=0.7))
    tokens, logps = run(engine, [0])
    ids = PROMPT + tokens[0]
    full = jax.nn.log_softmax(reference_logits(ids) / 0.7)
    at = np.arange(len(PROMPT) - 1, len(ids) - 1)
    np.testing.assert_allclose(logps[0], full[at, np.asarray(tokens[0])], atol=1e-4)


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
    engine.fork(0, [1, 3])
    for slot in (0, 1, 3):
        begin(engine, slot, PROMPT, 40)
    tokens, _ = run(engine, [0, 1, 3])
    assert tokens[0] == tokens[1] == tokens[3] == reference_greedy(PROMPT, 40 - len(PROMPT))


def test_a_prompt_longer_than_the_largest_bucket_is_fed_in_pieces():
    long = (PROMPT * 7)[:75]
    engine = make()
    engine.extend([(2, 0, long), (0, 0, PROMPT)])
    begin(engine, 2, long, 85)
    begin(engine, 0, PROMPT, 21)
    tokens, _ = run(engine, [0, 2])
    assert tokens[2] == reference_greedy(long, 10)
    assert tokens[0] == reference_greedy(PROMPT, 10)


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
