"""A server of several adapters over one base."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import openai
import pytest
from flax.traverse_util import flatten_dict

from coa_jax.data.trajectory import read_trajectories
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import load_model, save_model
from coa_jax.model.config import LoraConfig
from coa_jax.model.params import join, split_trained
from coa_jax.model.peft_io import save_trained
from coa_jax.model.tokenizer import eos_ids
from coa_jax.rollout.endpoint import PolicyEndpoint
from coa_jax.serve.run import make_services
from coa_jax.tools.make import ToolsConfig
from tests import forked, tiny_policy
from tests.evaluation.tiny_evaluation import ONE, run
from tests.serve.live import CONFIG, SHAPES, meter, server
from tests.serve.test_completions import QUESTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
LORAS = {
    "one": LoraConfig(rank=2, alpha=6.0),
    "two": LoraConfig(rank=3, alpha=3.0, projections=("v", "o", "down")),
}
TOOLS = ToolsConfig(("code",))
NAMES = ("tiny", *LORAS)


def write_adapter(folder: Path, base: Path, lora: LoraConfig, seed: int, **card: str) -> None:
    """Writes ``model-adapters``, and ``model`` with the adapters merged, as after training."""
    model = load_model(base)
    config = dataclasses.replace(model.config, lora=lora)
    adapters, kept = split_trained(model.params, config, seed)
    noise = np.random.default_rng(seed)
    adapters = jax.tree.map(lambda x: x + noise.normal(0, 0.15, x.shape).astype("f"), adapters)
    trained = model.replace(config=config, params=join(adapters, kept), card=card)
    settings = {"optimizer": {"total_steps": 1}, "data": "x"}
    save_trained(trained, str(base), folder / "model", "float32", "sft", settings)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A base, and two adapters of it with other ranks and other projections."""
    path = tmp_path_factory.mktemp("adapters")
    save_model(tiny_policy.policy(), path / "base")
    for seed, (name, lora) in enumerate(LORAS.items()):
        write_adapter(path / name, path / "base", lora, seed, protocol="generalist")
    return path


def settings(path, **changes):
    adapters = {name: str(path / name / "model-adapters") for name in LORAS}
    values = {"model": str(path / "base"), "protocol": "", "adapters": adapters, **changes}
    return dataclasses.replace(CONFIG, **values)


def stacked() -> int:
    """The number of arrays in the layout of training, in which the base is loaded."""
    gc.collect()
    shape = tiny_policy.policy().params["layers"]["mlp"]["gate_up"]["kernel"].shape
    return sum(array.shape == shape for array in jax.live_arrays())


@pytest.fixture(scope="module")
def services(written):
    before = stacked()
    made = make_services(settings(written), TOOLS)
    assert stacked() == before  # the engines have arrays of their own
    return made


@pytest.fixture(scope="module")
def client(services):
    with server(services=services) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def ask(client, name, question, temperature, **options):
    messages = [{"role": "user", "content": question}]
    options = {"max_tokens": 60, "logprobs": True, "seed": 5, "n": 2, **options}
    return client.chat.completions.create(
        model=name, messages=messages, temperature=temperature, **options
    )


def tokens(answer):
    """The tokens of every completion, and their log-probabilities."""
    choices = [choice.logprobs.content for choice in answer.choices]
    return [
        [[token.token for token in choice] for choice in choices],
        np.concatenate([[token.logprob for token in choice] for choice in choices]),
    ]


ASKED = [(q, temperature) for q in QUESTIONS for temperature in (0.0, 1.5)]


def test_the_arrays_of_the_base_lie_in_memory_once(services):
    first, *others = [service.engines[0].params for service in services]
    for params in others:
        shared = zip(jax.tree.leaves(first.shared), jax.tree.leaves(params.shared), strict=True)
        assert all(one is other for one, other in shared)
        for layer, other in zip(first.layers, params.layers, strict=True):
            kept, adapted = flatten_dict(layer), flatten_dict(other)
            assert all(adapted[path] is values for path, values in kept.items())
            assert {path[-1] for path in adapted.keys() - kept.keys()} == {"a", "b"}


def test_policies_that_are_asked_at_the_same_time_write_what_each_writes_alone(client, written):
    jobs = [(name, *asked) for asked in ASKED for name in NAMES]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: ask(client, *job), jobs))
    together = dict(zip(jobs, map(tokens, answers), strict=True))
    assert [answer.model for answer in answers] == [name for name, *_ in jobs]
    texts = {job: result[0] for job, result in together.items()}
    assert all(texts["one", *asked] != texts["two", *asked] for asked in ASKED)
    # On the same server, one after another: the same bits.
    for job in jobs[:6]:
        again = tokens(ask(client, *job))
        assert again[0] == texts[job]
        np.testing.assert_array_equal(again[1], together[job][1])
    # Each on a server of its own, with the adapter merged into the weights.
    for name in NAMES:
        model = load_model(written / "base" if name == "tiny" else written / name / "model")
        engine = Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer))
        config = dataclasses.replace(CONFIG, name=name)
        with server(config, policy=model, on=[engine]) as address:
            alone = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
            for asked in ASKED:
                expected = tokens(ask(alone, name, *asked))
                assert texts[name, *asked] == expected[0]
                np.testing.assert_allclose(together[name, *asked][1], expected[1], atol=2e-4)


def test_streams_texts_scores_and_agents_come_from_the_policy_that_is_named(client, written):
    question = QUESTIONS[2]
    for name in LORAS:
        whole = ask(client, name, question, 0.0, n=1).choices[0].message.content
        stream = ask(client, name, question, 0.0, n=1, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    scored = {
        name: client.completions.create(
            model=name, prompt="what it is", max_tokens=0, echo=True, logprobs=1
        )
        for name in NAMES
    }
    logps = [scored[name].choices[0].logprobs.token_logprobs[1:] for name in NAMES]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(np.subtract(logps[one], logps[other])).max() > 1e-2
    agent = ask(
        client,
        "tiny-agent",
        tiny_policy.TASKS[2].question,
        0.0,
        n=1,
        logprobs=None,
        max_tokens=None,
    )
    assert agent.choices[0].model_extra["agent"]["answer"] == tiny_policy.TASKS[2].gold[0]
    other = ask(
        client, "one-agent", tiny_policy.TASKS[2].question, 0.0, n=1, logprobs=None, max_tokens=None
    )
    assert other.choices[0].message.content != agent.choices[0].message.content


def test_all_policies_are_listed_and_another_name_is_not_found(client):
    ids = [model.id for model in client.models.list()]
    assert ids == ["tiny", "tiny-agent", "one", "one-agent", "two", "two-agent"]
    assert client.models.retrieve("two-agent") == list(client.models.list())[-1]
    with pytest.raises(openai.NotFoundError) as refused:
        ask(client, "three", "x", 0.0)
    with pytest.raises(openai.NotFoundError) as unlisted:
        client.models.retrieve("three")
    assert unlisted.value.body == refused.value.body
    assert refused.value.body == {
        "message": f"there is no model 'three' here, but {' and '.join((*ids[::2], *ids[1::2]))}",
        "type": "not_found_error",
        "param": "model",
        "code": 404,
    }
    with pytest.raises(openai.NotFoundError, match=r"'one-agent' .* tiny and one and two"):
        client.completions.create(model="one-agent", prompt="x")
    address = str(client.base_url).removesuffix("/v1/")
    assert meter(address, "coa_jax_slots") == len(NAMES) * SHAPES.slots


@pytest.mark.slow
def test_evaluations_of_served_policies_run_at_once_as_each_runs_alone(client, tmp_path):
    def evaluated(name, folder):
        endpoint = PolicyEndpoint(str(client.base_url), name, attempts=1)
        run(folder / name, dataclasses.replace(ONE, endpoint=endpoint))
        return [t.text for t in read_trajectories(folder / name / "traces.jsonl")]

    with concurrent.futures.ThreadPoolExecutor(len(LORAS)) as pool:
        jobs = {name: pool.submit(evaluated, name, tmp_path / "together") for name in LORAS}
    together = {name: job.result() for name, job in jobs.items()}
    assert together == {name: evaluated(name, tmp_path / "alone") for name in LORAS}
    assert together["one"] != together["two"]


def of_another_base(path):
    config = path / "two" / "model-adapters" / "adapter_config.json"
    changed = {**json.loads(config.read_text()), "base_model_name_or_path": str(path / "one")}
    config.write_text(json.dumps(changed))


def of_another_rank(path):
    config = path / "two" / "model-adapters" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 4}))


def of_other_projections(path):
    tensors = path / "two" / "model-adapters" / "adapter_model.safetensors"
    text = tensors.read_bytes()
    tensors.write_bytes(
        text.replace(b"layers.1.mlp.down_proj.lora_B", b"layers.1.mlp.skew_proj.lora_B")
    )


def of_another_protocol(path):
    card = path / "two" / "model-adapters" / "agent.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "protocol": "web"}))


def merged(path):
    shutil.rmtree(path / "two" / "model-adapters")
    (path / "two" / "model").rename(path / "two" / "model-adapters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_base, "adapter_config.json: the base model is "),
        (of_another_rank, "down_proj.lora_A.weight is missing or does not fit "),
        (of_other_projections, "down_proj.lora_B.weight is missing or does not fit "),
        (of_another_protocol, r"different protocols \(one: generalist, two: web\)"),
        (merged, "has no adapter_config.json: give the directory of a LoRA adapter"),
    ],
)
def test_a_policy_that_cannot_share_the_base_is_refused(written, tmp_path, change, message):
    for name in LORAS:
        shutil.copytree(written / name, tmp_path / name)
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        make_services(settings(tmp_path, model=str(written / "base")), TOOLS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "adapters.tiny: clients could not tell tiny or tiny-agent of two policies apart"),
        ("one-agent", "adapters.one-agent: clients could not tell one-agent of"),
        ("a/b", "adapters is 'a/b'; give a name of letters"),
    ],
)
def test_names_that_cannot_tell_policies_apart_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        settings(Path("x"), adapters={"one": "x", name: "y"})


def test_a_command_line_names_adapters_and_a_refusal_is_one_line(written):
    refused = forked.run(
        ["-m", "coa_jax.cli.serve", f"--config.model={written / 'base'}", "--config.port=0",
         f"--config.adapters.mine={written / 'one' / 'model'}"],
        REPOSITORY,
    )  # fmt: skip
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {written / 'one' / 'model'} has no adapter_config.json")
