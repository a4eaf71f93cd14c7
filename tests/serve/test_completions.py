"""Completions of a live server, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import torch
import transformers

from coa_jax.engine.engine import Engine
from coa_jax.model.api import save_model
from coa_jax.model.encode import observation_text
from coa_jax.model.tokenizer import decode_ids, encode_plain, eos_ids
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.rollout.constrain import constraint_for
from coa_jax.tools.base import ToolContext, call_tool
from tests import tiny_policy
from tests.chats import chat_ids
from tests.rollout.small_loop import requests, run
from tests.serve.live import BUDGET, CONFIG, SHAPES, server
from tests.tiny_policy import TASKS

PROTOCOL = get_protocol(tiny_policy.PROTOCOL)
QUESTIONS = [render_prompt(PROTOCOL, task.question, style="brief") for task in TASKS]


@pytest.fixture(scope="module")
def client():
    with server() as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def written():
    """What the policy writes by itself: the beginning of its trajectories, up to the tool's tag."""
    ends = [f"</{task.metadata['kind']}>" for task in TASKS]
    texts = [group[0].text for group in run(requests())]
    return [text[: text.index(end) + len(end)] for text, end in zip(texts, ends, strict=True)]


def chat(client, content, **options):
    messages = [{"role": "user", "content": content}]
    options = {"temperature": 0, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def torch_logps(tmp_path_factory, ids):
    """Log-probabilities ``[T - 1, V]`` of what follows each token, by another implementation."""
    path = tmp_path_factory.mktemp("torch")
    save_model(tiny_policy.policy(), path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).numpy()


def test_a_completion_is_what_the_policy_writes_and_ends_before_the_stop_string(client, written):
    for content, text in zip(QUESTIONS, written, strict=True):
        stop = text[text.rindex("</") :]
        answer = chat(client, content, stop=["</nothing>", stop])
        (choice,) = answer.choices
        assert choice.message.content + stop == text
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
        prompt = chat_ids(tiny_policy.policy().tokenizer, content)
        assert answer.usage.prompt_tokens == len(prompt)
        assert 0 < answer.usage.completion_tokens <= len(text)
        kept = chat(client, content, stop=stop, extra_body={"include_stop_str_in_output": True})
        assert kept.choices[0].message.content == text


def test_a_client_that_calls_the_tools_itself_gets_to_the_answer(client):
    """In the manner of the release: a growing prefix of the assistant's turn, cut at stop strings.

    The loop goes on from ``<think>`` and reads ``stop_reason`` beside the fields of OpenAI.
    """
    for task, content in zip(TASKS, QUESTIONS, strict=True):
        said = "<think>"
        for _ in range(4):
            answer = client.chat.completions.create(
                model="tiny",
                messages=[
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": said},
                ],
                temperature=0,
                stop=["</wiki_search>", "</code>", "</answer>"],
            )
            (choice,) = answer.choices
            stop = choice.model_extra["stop_reason"]
            said += choice.message.content + stop
            if stop == "</answer>":
                break
            name = stop[2:-1]
            body = said[said.rindex(f"<{name}>") + len(name) + 2 : -len(stop)]
            tool = tiny_policy.tools()[name]
            seen = asyncio.run(call_tool(tool, body, ToolContext("test", 0, None, ())))
            said += observation_text(PROTOCOL, seen.text)
        assert said.endswith(f"<answer>{task.gold[0]}</answer>")


def test_a_stream_joins_to_the_completion(client):
    whole = chat(client, QUESTIONS[0], n=2, temperature=2.0, seed=3, max_tokens=30, logprobs=True)
    streamed = chat(
        client, QUESTIONS[0], n=2, temperature=2.0, seed=3, max_tokens=30, logprobs=True,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    texts, tokens, ends, usage = ["", ""], [[], []], [None, None], None
    for chunk in streamed:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    for got, choice in zip(tokens, whole.choices, strict=True):
        assert [t.logprob for t in got] == [t.logprob for t in choice.logprobs.content]
    assert len(set(texts)) == 2


def test_a_seed_makes_a_request_come_out_again_and_none_makes_it_differ(client):
    def text(**options):
        options = {"temperature": 3.0, "max_tokens": 24, **options}
        return chat(client, QUESTIONS[1], **options).choices[0].message.content

    assert text(seed=5) == text(seed=5)
    assert text(seed=5) != text(seed=6)
    assert text() != text()
    assert text(seed=5, temperature=0.0) == text(temperature=0.0)


def test_a_model_whose_logits_are_not_finite_is_a_fault_of_the_server():
    model = tiny_policy.policy()
    params = jax.tree.map(lambda x: x * jnp.nan, model.params)
    broken = Engine(params, model.config, SHAPES, eos_ids(model.tokenizer))
    with server(on=[broken]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            chat(client, QUESTIONS[0])
        with pytest.raises(openai.APIError, match="logits are not finite"):
            list(chat(client, QUESTIONS[0], stream=True))


def test_a_completion_without_a_stop_ends_with_the_budget_or_the_turn(client):
    short = chat(client, QUESTIONS[0], max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    assert short.choices[0].model_extra["stop_reason"] is None


@pytest.mark.slow
def test_neither_the_budgets_nor_the_constraint_of_agents_hold_for_a_completion(client, written):
    model = tiny_policy.policy()
    budget = dataclasses.replace(BUDGET, max_turn_tokens=5, max_seconds=1e-3, constrain=True)
    size = model.config.vocab_size
    constraint = constraint_for(budget, model.tokenizer, size, [tiny_policy.PROTOCOL])
    engine = Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer), constraint)
    with server(dataclasses.replace(CONFIG, rollout=budget), on=[engine]) as address:
        other = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=60)
        answer = chat(other, QUESTIONS[0], max_tokens=100)
        assert answer.choices == chat(client, QUESTIONS[0], max_tokens=100).choices
        # It went on after a call, which nothing may follow under the constraint.
        assert len(answer.choices[0].message.content) > len(written[0])
        agent = other.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": TASKS[0].question}]
        )
        assert agent.choices[0].model_extra["agent"]["stop_reason"] in ("turn_length", "deadline")


def test_log_probabilities_equal_those_of_torch(client, tmp_path_factory):
    tokenizer = tiny_policy.policy().tokenizer
    answer = chat(
        client, QUESTIONS[0], max_tokens=12, logprobs=True, top_logprobs=3, seed=1, temperature=1,
        extra_body={"prompt_logprobs": 2},
    )  # fmt: skip
    prompt = chat_ids(tokenizer, QUESTIONS[0])
    content = answer.choices[0].logprobs.content
    vocabulary = {decode_ids(tokenizer, [i]): i for i in range(len(tokenizer))}
    ids = [vocabulary[bytes(token.bytes).decode()] for token in content]
    expected = torch_logps(tmp_path_factory, [*prompt, *ids])
    own = expected[np.arange(len(expected)), [*prompt[1:], *ids]]
    np.testing.assert_allclose([t.logprob for t in content], own[len(prompt) - 1 :], atol=2e-4)
    for row, token in zip(expected[len(prompt) - 1 :], content, strict=True):
        best = [alternative.logprob for alternative in token.top_logprobs]
        np.testing.assert_allclose(best, np.sort(row)[::-1][:3], atol=2e-4)
    first, *rows = answer.model_extra["prompt_logprobs"]
    assert first is None
    got = [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]
    np.testing.assert_allclose(got, own[: len(prompt) - 1], atol=2e-4)
    ranks = [row[str(token)]["rank"] for row, token in zip(rows, prompt[1:], strict=True)]
    above = (expected > own[:, None] + 1e-3).sum(-1)[: len(ranks)]
    assert all(rank >= more + 1 for rank, more in zip(ranks, above, strict=True))


def test_texts_are_scored_and_gone_on_with(client):
    tokenizer = tiny_policy.policy().tokenizer
    scored = client.completions.create(
        model="tiny", prompt=["river", "lake Skane"], max_tokens=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in scored.choices] == ["river", "lake Skane"]
    assert scored.usage.completion_tokens == 0
    for choice in scored.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert all(logp < 0 for logp in choice.logprobs.token_logprobs[1:])
        assert "".join(choice.logprobs.tokens) == choice.text
    ids = chat_ids(tokenizer, QUESTIONS[0])
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=9, temperature=0)
    assert (
        by_ids.choices[0].text
        == chat(client, QUESTIONS[0], max_tokens=9).choices[0].message.content
    )
    text = "<think>found</think>"
    by_text = client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0)
    same = encode_plain(tokenizer, text)
    again = client.completions.create(model="tiny", prompt=same, max_tokens=4, temperature=0)
    assert by_text.choices[0].text == again.choices[0].text


def test_several_lists_of_ids_are_several_prompts(client):
    tokenizer = tiny_policy.policy().tokenizer
    texts = ["river", "lake Skane"]
    options = {"model": "tiny", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    by_ids = client.completions.create(
        prompt=[encode_plain(tokenizer, text) for text in texts], **options
    )
    by_text = client.completions.create(prompt=texts, **options)
    assert by_ids.choices == by_text.choices and len(by_ids.choices) == 2
    assert by_ids.usage == by_text.usage


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], [[1], 2], [[1], "a"], [[-1]], [["a"]], [[1]] * 65, [[10**6]]]
)
def test_lists_that_are_no_prompts_are_refused(client, prompt):
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="tiny", prompt=prompt, max_tokens=1)


def test_no_limit_of_tokens_is_all_the_room_and_no_word_of_it_is_16(client):
    prompt = chat_ids(tiny_policy.policy().tokenizer, QUESTIONS[0])

    def tokens(**options):
        options = {"prompt": prompt, "temperature": 0.0, **options}
        return client.completions.create(model="tiny", **options).usage.completion_tokens

    assert tokens() == 16
    most = tokens(extra_body={"max_tokens": None})
    assert most == chat(client, QUESTIONS[0]).usage.completion_tokens > 16


def test_the_agent_writes_the_trajectory_of_a_rollout_and_says_what_was_called(client):
    for task, (trajectory,) in zip(TASKS, run(requests()), strict=True):
        answer = client.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": task.question}], temperature=0
        )
        (choice,) = answer.choices
        assert choice.message.content == trajectory.text
        agent = choice.model_extra["agent"]
        assert (agent["answer"], agent["stop_reason"]) == (task.gold[0], "answer")
        calls = [
            (entry["tool"], entry["arguments"], entry["outcome"]) for entry in agent["tool_calls"]
        ]
        assert calls == [(c.tool, c.arguments, c.outcome) for c in trajectory.tool_calls]
        stream = client.chat.completions.create(
            model="tiny-agent", messages=[{"role": "user", "content": task.question}],
            temperature=0, stream=True,
        )  # fmt: skip
        chunks = [choice for chunk in stream for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in chunks) == trajectory.text
        authors = [c.model_extra["agent"]["author"] for c in chunks if c.delta.content]
        assert authors.count("environment") == 1


def test_a_conversation_of_several_turns_is_read_as_chat_ml(client):
    tokenizer = tiny_policy.policy().tokenizer
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": QUESTIONS[0]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne two<|im_end|>\n"
    text += f"<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n"
    ids = tokenizer(text + "<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids)


def test_the_model_class_of_smolagents_runs_against_it(client):
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(
        "tiny", api_base=str(client.base_url), api_key="any", temperature=0, max_tokens=40
    )
    message = smolagents.ChatMessage(role="user", content=QUESTIONS[0])
    answer = model.generate([message], stop_sequences=["</plan>"])
    assert (
        answer.content
        == chat(client, QUESTIONS[0], stop="</plan>", max_tokens=40).choices[0].message.content
    )
    assert answer.token_usage.output_tokens > 0
