"""On-policy distillation: local teachers, teachers on a server, and a student that learns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward
from coa_jax.errors import UserError
from coa_jax.model.api import Model, save_model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import pack
from coa_jax.train.config import TeacherConfig
from coa_jax.train.examples import trajectory_example
from coa_jax.train.experience import complete_experience, score
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state
from coa_jax.train.teacher import Teacher, load_teacher, request_logprobs, scored_by_server
from coa_jax.train.update import update
from tests import tiny_policy
from tests.tiny_tokenizer import train_tokenizer
from tests.train.bare import bare
from tests.train.test_update import LENGTH, MODEL, config

LARGER = ModelConfig("llama", MODEL.vocab_size, 24, 32, 2, 2, 1, 12)
COMPUTE = local_compute()


def teacher():
    """A policy far from uniform: its logits, tied to its embeddings, are large."""
    params = init_params(LARGER, jax.random.key(8))
    return Teacher(LARGER, {**params, "embed": jax.tree.map(lambda x: 8 * x, params["embed"])})


def opd(**changes):
    knobs = {"opd_coef": 1.0, **changes.pop("knobs", {})}
    return config(
        "opd",
        **{"knobs": knobs, "groups": 24, "group_size": 1, "temperature": 1.0, "rows": 8,
           "teacher": TeacherConfig(model="teacher"), **changes},
    )  # fmt: skip


def sampled(params, number, seed, length=12):
    """Trajectories that a policy has sampled after prompts of two tokens, and all logits."""
    rng, model = np.random.default_rng(seed), Model(MODEL, params, None)
    tokens = rng.integers(0, MODEL.vocab_size, (number, length))
    for t in range(2, length):
        z = np.asarray(model(tokens))[:, t - 1]
        tokens[:, t] = np.argmax(z + rng.gumbel(size=z.shape), axis=-1)
    z = model(tokens)
    logps = np.asarray(jax.nn.log_softmax(z))[:, :-1]
    author = np.where(np.arange(length) < 2, Author.PROMPT, Author.POLICY)
    made = []
    for i, row in enumerate(tokens):
        logp = np.pad(np.take_along_axis(logps[i], row[1:, None], 1)[:, 0], (1, 0))
        logp = np.where(author == Author.POLICY, logp, 0)
        made.append(bare(row, author, task_id=f"t{i}", logp=logp, reward=Reward(0.0)))
    return made, tokens


def divergence(params, of):
    """Mean KL(student, teacher) over what the student samples, all tokens of the vocabulary."""
    _, tokens = sampled(params, 64, 99)
    p, q = (
        np.asarray(jax.nn.log_softmax(Model(c, w, None)(tokens)), np.float64)[:, 1:-1]
        for c, w in ((MODEL, params), of)
    )
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.slow
def test_a_student_moves_to_its_teacher():
    settings = opd(optimizer=OptimizerConfig(2e-2, 60, final_ratio=0.1, weight_decay=0.0))
    state, of = init_state(init_params(MODEL, jax.random.key(2)), settings.optimizer), teacher()
    before, history = divergence(state.params, of), []
    for step in range(60):
        trajectories, _ = sampled(state.params, settings.groups, step)
        state, _, stats = update(
            settings, state, MODEL, [[t] for t in trajectories], COMPUTE, teacher=of, version=step
        )
        history.append(stats["opd/reverse_kl"])
    after = divergence(state.params, of)
    assert after < 0.25 * before
    # What a step reports is that divergence, estimated from its own samples.
    assert np.mean(history[:3]) == pytest.approx(before, rel=0.3)
    assert np.mean(history[-3:]) == pytest.approx(after, rel=0.5, abs=0.1)


@pytest.mark.slow
def test_a_teachers_advantages_are_added_to_those_of_rewards():
    of, student = teacher(), init_params(MODEL, jax.random.key(2))
    trajectories, _ = sampled(student, 4, 0)
    batch = pack([trajectory_example(t, 0.25) for t in trajectories], LENGTH)
    settings = {"compute": COMPUTE, "temperature": 1.0}
    for coef, old_logp in ((1.0, "trainer"), (0.5, "sampler")):
        moved = batch._replace(logp=batch.logp + np.float32(0.125) * batch.mask)
        algorithm = Algorithm("grpo", opd_coef=coef, old_logp=old_logp, kl_coef=0.0)
        (filled,), stats = complete_experience(
            algorithm.resolve(LENGTH), [moved], MODEL, student, critic=None, reference=None,
            teacher=of, **settings,
        )  # fmt: skip
        by_teacher = np.asarray(score(of.params, batch, model_config=LARGER, **settings))
        old = moved.logp
        if old_logp == "trainer":
            old = np.asarray(score(student, batch, model_config=MODEL, **settings))
        gain = (by_teacher - old) * batch.mask
        np.testing.assert_allclose(
            filled.advantage, (0.25 + coef * gain) * batch.mask, rtol=1e-5, atol=1e-6
        )
        assert stats["opd/reverse_kl"] == pytest.approx(-gain.sum() / batch.mask.sum(), rel=1e-5)
        assert filled.teacher_logp is None  # the loss does not read it


# --- local teachers ------------------------------------------------------------------------


def test_a_teacher_with_another_vocabulary_is_refused_in_one_line(tmp_path):
    policy = tiny_policy.policy()
    save_model(Model(policy.config, policy.params, policy.tokenizer), tmp_path / "same")
    found = load_teacher(
        TeacherConfig(model=str(tmp_path / "same")), policy.tokenizer, "float32", mesh=None
    )
    assert found is not None and found.config == policy.config
    other = train_tokenizer(["another language"], len(policy.tokenizer))
    with pytest.raises(UserError, match=r"teacher.model is '.*same', whose vocab") as e:
        load_teacher(TeacherConfig(model=str(tmp_path / "same")), other, "float32", mesh=None)
    assert "\n" not in str(e.value)
    assert load_teacher(TeacherConfig(), other, "float32", mesh=None) is None


def test_a_constraint_fits_a_teacher_with_more_or_fewer_embeddings():
    allowed = jnp.asarray([[7, 8, 9]], jnp.uint32)  # 65 to 96 tokens
    for vocab, wanted in ((96, [7, 8, 9]), (130, [7, 8, 9, 0, 0]), (64, [7, 8])):
        of = Teacher(dataclasses.replace(LARGER, vocab_size=vocab), {})
        assert of.fitted(allowed)[0].tolist() == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": TeacherConfig()}, r"opd_coef is 1 and there is no teacher: name a model in"),
        ({"algorithm": Algorithm("ppo")}, r"teacher.model is 'teacher', and the algorithm uses"),
        (
            {"teacher": TeacherConfig("http://localhost:1/v1", "m"), "temperature": 0.7},
            r"temperature is 0.7, and a server scores at temperature 1",
        ),
    ],
)
def test_settings_that_a_teacher_cannot_serve_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        opd(**changes)
    with pytest.raises(UserError, match=r"^model is missing; .*http://localhost:1/v1$"):
        TeacherConfig(url="http://localhost:1/v1")


# --- teachers behind a server --------------------------------------------------------------


def logp_of(ids, at):
    """What the server below says of a token."""
    return -(ids[at] % 7 + 0.25 * at) / 4


def answer(ids):
    """The body of vLLM's answer to ``prompt_logprobs=1``."""
    entries = [None]
    for at, token in list(enumerate(ids))[1:]:
        own = {"logprob": logp_of(ids, at), "rank": 3, "decoded_token": f"<{token}>"}
        best = {"logprob": -0.01, "rank": 1, "decoded_token": " the"}
        entries.append({str(token): own, str(token + 1): best})
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1764000000,
        "model": "large",
        "choices": [
            {
                "index": 0,
                "text": " the",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": entries,
            }
        ],
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1},
    }


@contextlib.contextmanager
def serving(*faults, change=lambda body: body):
    """A server and what it was asked; ``faults`` are statuses or texts that it answers first."""
    pytest.importorskip("openai", reason="its client is an extra")
    asked, left = [], list(faults)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(size))
            asked.append((self.path, self.headers.get("Authorization"), body))
            fault = left.pop(0) if left else None
            text = json.dumps(change(answer(body["prompt"])))
            self.send_response(fault if isinstance(fault, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write((fault if isinstance(fault, str) else text).encode())

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", asked
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_a_server_is_asked_for_the_log_probabilities_of_token_ids(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    ids = [5, 9, 2, 14]
    with serving() as (url, asked):
        found = asyncio.run(
            request_logprobs(TeacherConfig(url, "large", key_env="TEACHER_KEY"), ids)
        )
    assert found.dtype == np.float32
    assert found.tolist() == [0.0, *(np.float32(logp_of(ids, at)) for at in (1, 2, 3))]
    ((path, key, body),) = asked
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body["model"] == "large" and body["prompt"] == ids and body["prompt_logprobs"] == 1


def test_what_fails_in_passing_is_asked_again():
    with serving(503, '{"choices": [') as (url, asked):
        found = asyncio.run(request_logprobs(TeacherConfig(url, "large"), [1, 2]))
    assert found[1] == np.float32(logp_of([1, 2], 1)) and len(asked) == 3


def without_scores(body):
    del body["choices"][0]["prompt_logprobs"]
    return body


def other_tokens(body):
    entries = body["choices"][0]["prompt_logprobs"]
    entries[1] = {str(int(key) + 50): value for key, value in entries[1].items()}
    return body


def cut(body):
    body["choices"][0]["prompt_logprobs"].pop()
    return body


def no_number(body):
    for value in body["choices"][0]["prompt_logprobs"][1].values():
        value["logprob"] = "NaN"
    return body


@pytest.mark.parametrize("change", [without_scores, other_tokens, cut, no_number])
def test_an_answer_without_the_scores_is_explained_in_one_line(change):
    said = "answered without the log-probability of each token of the prompt"
    with (
        serving(change=change) as (url, asked),
        pytest.raises(UserError, match=f"the teacher at {url} {said}") as e,
    ):
        asyncio.run(request_logprobs(TeacherConfig(url, "large"), [1, 2, 3]))
    assert "\n" not in str(e.value) and len(asked) == 1


def test_a_server_that_refuses_or_is_not_there_ends_the_run_with_one_line():
    example = trajectory_example(sampled(init_params(MODEL, jax.random.key(2)), 1, 0)[0][0], 0.0)
    said = r"gave no scores: .*status 400.*same command again"
    with serving(*[400] * 9) as (url, _), pytest.raises(UserError, match=said):
        scored_by_server(TeacherConfig(url, "large", attempts=2), [[example] * 3], 9.0)
    with pytest.raises(UserError, match=f"{url} gave no scores: the server"):
        scored_by_server(TeacherConfig(url, "large", attempts=1), [[example]], 9.0)


@pytest.mark.slow
def test_every_example_gets_its_own_scores_and_learns_from_them():
    trajectories, _ = sampled(init_params(MODEL, jax.random.key(2)), 5, 0)
    examples = [trajectory_example(t, 0.0) for t in trajectories]
    with serving() as (url, asked):
        found = scored_by_server(
            TeacherConfig(url, "large", concurrency=2), [examples[:2], examples[2:]], 9.0
        )
    assert [len(group) for group in found] == [2, 3] and len(asked) == 5
    for example, scored in zip(examples, [e for group in found for e in group], strict=True):
        ids = example.tokens.tolist()
        wanted = [0.0, *(np.float32(logp_of(ids, at)) for at in range(1, len(ids)))]
        assert scored.more["teacher_logp"].tolist() == wanted

    with serving() as (url, asked):
        settings = opd(groups=4, mini_batch=2, epochs=2, teacher=TeacherConfig(url, "large"))
        state = init_state(init_params(MODEL, jax.random.key(2)), settings.optimizer)
        state, _, stats = update(settings, state, MODEL, [[t] for t in trajectories[:4]], COMPUTE)
    assert int(state.step) == 4 and len(asked) == 4  # once, whatever the number of updates
    gain = [
        logp_of(t.tokens.tolist(), at) - t.logp[at]
        for t in trajectories[:4]
        for at in range(2, len(t.tokens))
    ]
    assert stats["opd/reverse_kl"] == pytest.approx(-np.mean(gain), rel=1e-4)


@pytest.mark.slow
def test_the_server_of_this_package_scores_as_a_local_teacher_does(tmp_path: Path):
    pytest.importorskip("starlette", reason="the server is an extra")
    from tests.serve.live import server

    policy = tiny_policy.policy()
    rng = np.random.default_rng(0)
    ids = rng.integers(5, policy.config.vocab_size, 40).tolist()
    with server() as address:
        found = asyncio.run(request_logprobs(TeacherConfig(f"{address}/v1", "tiny"), ids))
    z = policy([ids])[0]
    wanted = np.asarray(jax.nn.log_softmax(z))[np.arange(39), ids[1:]]
    np.testing.assert_allclose(found[1:], wanted, rtol=1e-4, atol=1e-4)
