"""Converts trajectories to documents of ATIF and back.

ATIF is the Agent Trajectory Interchange Format of Harbor, Tunix, NeMo Gym and many agents. A
document has steps: the question is a step of the user, and each turn of the policy is a step of the
agent.

=========================== =======================================================================
part of a trajectory        field of the document
=========================== =======================================================================
question                    ``message`` of the step of the user
thoughts                    ``reasoning_content`` of a step
other text of the policy    ``message`` of a step; plans, reflections and answers keep their tags
tool calls                  ``tool_calls`` of a step, and ``observation.results`` of the same step
token ids                   ``metrics.prompt_token_ids`` (everything before the turn) and
                            ``metrics.completion_token_ids`` of a step
log-probabilities           ``metrics.logprobs`` of a step
reward                      ``final_metrics.extra``: ``reward`` and ``reward_parts``
branches                    ``subagent_trajectories``
=========================== =======================================================================

The format has no field for protocols, roles, accepted answers and stop reasons. They are in
``extra.coa_jax``, together with every field that the steps do not give back exactly. Therefore
`from_atif` restores each bit of a trajectory. Documents of other programs lack this object; they
become trajectories without tags, whose tokens are kept if every prompt continues the prompt before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coa_jax.config import installed
from coa_jax.data.function_calls import PROTOCOL
from coa_jax.data.text_parts import Unusable
from coa_jax.data.trajectory import Author, Reward, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.protocol import BAD_CALL, THINK, get_protocol, hermes
from coa_jax.protocol.arguments import from_text, schemas

VERSION = "ATIF-v1.7"
"""Version of the written documents; later versions only add fields for sound."""

_OWN = "coa_jax"  # key of the fields in ``extra`` that the format lacks, and name of the agent
_TURN = "turn"  # tool of a `ToolCall` with which an environment answers a whole turn


def is_atif(value: Any) -> bool:
    """Returns whether a JSON value is an ATIF document (see `to_atif`), perhaps a malformed one."""
    return isinstance(value, dict) and {"schema_version", "agent", "steps"} <= value.keys()


def is_own(document: Mapping[str, Any]) -> bool:
    """Returns whether this project (`to_atif`) wrote an ATIF document."""
    extra = document.get("extra")
    return isinstance(extra, dict) and _OWN in extra


def decode_trajectory(value: Any) -> Trajectory:
    """Converts a JSON value to a trajectory: an ATIF document (`to_atif`) or a stored trajectory.

    Raises:
        KeyError, TypeError, ValueError: the value is neither of the two, or is malformed.
    """
    return from_atif(value) if is_atif(value) else Trajectory.from_json(value)


# --- writing -------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """A turn of the policy.

    Attributes:
        start, end: first token of the turn, and one past its last token.
        said: spans that the policy wrote.
        seen: spans of the environment that follow.
        calls: tool calls of the turn.
    """

    start: int
    end: int
    said: list[SegmentSpan]
    seen: list[SegmentSpan]
    calls: list[ToolCall]


def to_atif(trajectory: Trajectory) -> dict[str, Any]:
    """Converts a trajectory to an ATIF document, from which `from_atif` restores every bit.

    ATIF is the Agent Trajectory Interchange Format, which other agents and trainers use, see
    docs/data.md. The size of the document grows with the square of the number of turns, because
    each step repeats the token ids of its prompt.

    Returns:
        The document as JSON values. Write it with `jsonl.dumps`, because ``extra`` may contain NaN
        and infinities.
    """
    turns, stored = _turns(trajectory), trajectory.to_json()
    name = f"{trajectory.task_id}/{trajectory.sample_id}"
    question = {"step_id": 1, "source": "user", "message": trajectory.question}
    steps = [question, *itertools.starmap(_step(trajectory), enumerate(turns, 2))]
    document: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": trajectory.task_id,
        "trajectory_id": name,
        "agent": _agent(trajectory.protocol),
        "steps": steps,
        "final_metrics": _totals(trajectory.reward, turns),
    }
    document = _unicode(document)
    own: dict[str, Any] = {"tail": stored["tokens"][turns[-1].end if turns else 0 :]}
    restored = _restored(document, own)
    own |= {
        field: value
        for field, value in stored.items()
        if field != "branches"
        and (field not in restored or repr(restored[field]) != repr(value))  # -0.0 is not 0.0
    }
    if trajectory.text == "".join(span.text for span in trajectory.segments):
        del own["text"]
    text = jsonl.dumps(own)
    # Strict parsers refuse halves of surrogate pairs, but not their escapes in a text.
    document["extra"] = {_OWN: text if "\\ud" in text else own}
    if trajectory.branches:
        document["subagent_trajectories"] = [
            {**to_atif(branch), "trajectory_id": _unicode(f"{name}/{number}")}
            for number, branch in enumerate(trajectory.branches, 1)
        ]
    return document


def _turns(trajectory: Trajectory) -> list[_Turn]:
    """Cuts a trajectory into the turns of the policy, by the authors of its tokens.

    A trajectory without tokens of the policy is cut where its spans change from the environment to
    the policy.
    """
    own = trajectory.author == Author.POLICY
    edges = np.flatnonzero(np.diff(own.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    turns = [_Turn(start, end, [], [], []) for start, end in edges.tolist()]
    end, number = len(own), 0
    for span in trajectory.segments:
        by_policy = span.author == Author.POLICY
        if len(edges):
            number = max(number, int(np.searchsorted(edges[:, 0], span.start, "right")) - 1)
        elif not turns or (by_policy and turns[-1].seen):
            turns.append(_Turn(end, end, [], [], []))
            number = len(turns) - 1
        (turns[number].said if by_policy else turns[number].seen).append(span)
    calls = iter(trajectory.tool_calls)
    for turn in turns:  # each call that the policy could read has a span
        turn.calls.extend(itertools.islice(calls, len(turn.seen)))
    left = list(calls)
    if left and not turns:
        turns.append(_Turn(end, end, [], [], []))
    if left:
        turns[-1].calls.extend(left)
    return turns


def _step(trajectory: Trajectory) -> Any:
    """Returns a function that converts a step's number and a turn to a step of the document."""
    numbers = itertools.count(1)

    def step(number: int, turn: _Turn) -> dict[str, Any]:
        tools = {BAD_CALL, *(call.tool for call in turn.calls)}
        thoughts = [span for span in turn.said if span.role == THINK]
        texts = [span.text for span in turn.said if span.role not in (THINK, *tools)]
        calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
        for call in turn.calls:
            result: dict[str, Any] = {"content": call.observation, "extra": _outcome(call)}
            if call.tool != _TURN:
                identity = f"call_{next(numbers)}"
                calls.append(_call(trajectory.protocol, call, identity))
                result["source_call_id"] = identity
            results.append(result)
        spoken = turn.seen[len(turn.calls) :]
        results += [{"content": span.text if span.body is None else span.body} for span in spoken]
        row: dict[str, Any] = {"step_id": number, "source": "agent", "llm_call_count": 1}
        row["message"] = "".join(texts).strip()
        if thoughts:
            row["reasoning_content"] = "\n\n".join(span.body or span.text for span in thoughts)
        if calls:
            row["tool_calls"] = calls
        if results:
            row["observation"] = {"results": results}
        if turn.start < turn.end:
            row["metrics"] = _metrics(trajectory, turn)
        return row

    return step


def _call(protocol: str, call: ToolCall, identity: str) -> dict[str, Any]:
    try:
        arguments = from_text(get_protocol(protocol), call.tool, call.arguments)
    except UserError:
        arguments = {"input": call.arguments}
    call_fields = {"function_name": call.tool, "arguments": arguments}
    return {"tool_call_id": identity, **call_fields, "extra": {"text": call.arguments}}


def _outcome(call: ToolCall) -> dict[str, Any]:
    """Returns the fields of a call for which the format has no field."""
    stated = ("tool", "arguments", "observation")
    return {name: value for name, value in call.to_json().items() if name not in stated}


def _metrics(trajectory: Trajectory, turn: _Turn) -> dict[str, Any]:
    span = slice(turn.start, turn.end)
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.start,
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": trajectory.tokens[: turn.start].tolist(),
        "completion_token_ids": trajectory.tokens[span].tolist(),
    }
    if np.isfinite(trajectory.logp[span]).all():  # JSON has no other numbers
        metrics["logprobs"] = jsonl.encode_float32(trajectory.logp[span])
    return metrics


def _agent(protocol: str) -> dict[str, Any]:
    agent: dict[str, Any] = {"name": _OWN, "version": installed.VERSION}
    agent["extra"] = {"protocol": protocol}
    with contextlib.suppress(UserError):  # a protocol that is not registered here
        agent["tool_definitions"] = schemas(get_protocol(protocol))
    return agent


def _totals(reward: Reward | None, turns: Sequence[_Turn]) -> dict[str, Any]:
    totals: dict[str, Any] = {
        "total_prompt_tokens": sum(turn.start for turn in turns),
        "total_completion_tokens": sum(turn.end - turn.start for turn in turns),
        "total_steps": 1 + len(turns),
    }
    if reward is not None:
        fields = {"reward": reward.value, "reward_parts": reward.parts}
        totals["extra"] = {**fields, "reward_reason": reward.reason}
    return totals


def _unicode(value: Any) -> Any:
    """Replaces halves of surrogate pairs in all strings of a JSON value by U+FFFD."""
    if isinstance(value, dict):
        return {_unicode(key): _unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return value
        return [_unicode(item) for item in value]
    if not isinstance(value, str):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- reading -------------------------------------------------------------------------------


def from_atif(document: Mapping[str, Any]) -> Trajectory:
    """Converts an ATIF document to a trajectory; restores every bit of what `to_atif` wrote.

    Subagents become branches. In a document of another program, the message of the last step is the
    answer, if this step calls no tool. The resulting segments have the role ``think``, ``answer``
    or, for a call, the name of the tool. Images and sounds become their paths in brackets.

    Raises:
        KeyError, TypeError, ValueError: the document is malformed; the message names the step.
    """
    steps = _checked(document)
    branches = tuple(map(from_atif, _field(document, "subagent_trajectories", list, "it") or ()))
    if not is_own(document):
        return dataclasses.replace(_foreign(document, steps), branches=branches)
    own = document["extra"][_OWN]
    own = jsonl.loads(own) if isinstance(own, str) else own
    fields = {**_restored(document, own), **own}
    if "text" not in fields:
        fields["text"] = "".join(span["text"] for span in fields["segments"])
    return dataclasses.replace(Trajectory.from_json(fields), branches=branches)


def _restored(document: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a stored trajectory that the steps of our own document contain."""
    steps, totals = document["steps"], document.get("final_metrics") or {}
    reward: Any = None
    if (graded := totals.get("extra") or {}).keys() >= {"reward"}:
        names = (("value", "reward"), ("parts", "reward_parts"), ("reason", "reward_reason"))
        reward = {name: graded[key] for name, key in names}
    calls = []
    for step in steps:
        result_of = {result.get("source_call_id"): result for result in _results(step)}
        for call in step.get("tool_calls") or ():
            result = result_of[call["tool_call_id"]]
            sent = {"tool": call["function_name"], "arguments": call["extra"]["text"]}
            calls.append({**sent, "observation": result["content"], **result["extra"]})
    tokens, author, logp = _sequence(steps, own.get("tail", ()))
    return {
        "question": steps[0]["message"],
        "tokens": tokens,
        "author": author,
        "logp": jsonl.encode_float32(np.asarray(logp, np.float32)),
        "tool_calls": calls,
        "reward": reward,
    }


def _sequence(
    steps: Sequence[Mapping[str, Any]], tail: Sequence[int] = ()
) -> tuple[list[int], list[list[int]], list[float]]:
    """Joins the token ids of the steps to one sequence.

    The sequence is empty if a step has no ids, or if a prompt does not continue the sequence, for
    example because the agent shortened its context. A log-probability that is missing is NaN.

    Args:
        steps: the steps of a document.
        tail: token ids after the last completion.

    Returns:
        The token ids, pairs (author, number of tokens), and the log-probabilities.
    """
    tokens, author, logp = list[int](), list[list[int]](), list[float]()

    def add(who: Author, ids: Sequence[int], logs: Sequence[float]) -> None:
        if ids:
            tokens.extend(ids)
            author.append([int(who), len(ids)])
            logp.extend(logs)

    for metrics in (step.get("metrics") or {} for step in steps if step["source"] == "agent"):
        prompt, ids = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
        if not ids and not metrics.get("completion_tokens"):  # no model wrote the step
            continue
        if prompt is None or ids is None or prompt[: len(tokens)] != tokens:
            return [], [], []
        more = prompt[len(tokens) :]
        add(Author.ENVIRONMENT if tokens else Author.PROMPT, more, [0.0] * len(more))
        add(Author.POLICY, ids, metrics.get("logprobs") or [np.nan] * len(ids))
    add(Author.ENVIRONMENT if tokens else Author.PROMPT, tail, [0.0] * len(tail))
    return tokens, author, logp


def _foreign(document: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Trajectory:
    """Converts a document of another program."""
    talk = _Talk(steps)
    for number, step in enumerate(steps):
        talk.add(number, step)
    agent, extra = document["agent"], document.get("extra") or {}
    answered = any(span.role == "answer" for span in talk.spans)
    totals = document.get("final_metrics") or {}
    graded = {**extra, **(totals.get("extra") or {})}.get("reward")
    facts: dict[str, Any] = {"agent": f"{agent.get('name')} {agent.get('version', '')}".strip()}
    facts |= {"model": agent.get("model_name"), "stage": agent.get("name")}
    facts |= {name: document.get(name) for name in ("session_id", "continued_trajectory_ref")}
    gold = extra.get("gold") or ()
    tokens, author, logp = talk.tokens
    return Trajectory(
        task_id=str(extra.get("task_id") or talk.question[:200] or document.get("session_id")),
        sample_id=0,
        question=talk.question,
        protocol=PROTOCOL,
        tokens=np.array(tokens, np.int32),
        author=np.repeat(
            np.array([who for who, _ in author], np.uint8), np.array([n for _, n in author], int)
        ),
        logp=np.array(logp, np.float32),
        text="".join(span.text for span in talk.spans),
        segments=tuple(talk.spans),
        tool_calls=tuple(talk.calls),
        stop_reason=StopReason.ANSWER if answered else StopReason.EOS,
        reward=Reward(float(graded)) if isinstance(graded, bool | int | float) else None,
        gold=tuple(map(str, gold if isinstance(gold, list) else [gold])) if gold else (),
        metadata={name: value for name, value in facts.items() if value is not None},
    )


class _Talk:
    """Builds the spans and the tool calls of a trajectory of another program.

    Attributes:
        question: message of the first step of the user; "" if there is none.
        tokens: token ids, authors and log-probabilities, see `_sequence`.
        spans, calls: the spans and the tool calls so far.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]]) -> None:
        self.tokens = _sequence(steps)
        self.spans, self.calls = list[SegmentSpan](), list[ToolCall]()
        places = [n for n, step in enumerate(steps) if step["source"] == "user"]
        self._question_at = places[0] if places else -1
        self.question = _text(steps[self._question_at]["message"]) if places else ""
        spoken = [n for n, step in enumerate(steps) if step["source"] != "system"]
        self._last = spoken[-1] if spoken else -1
        clocks = [_clock(step) for step in steps]
        first = next((clock for clock in clocks if clock is not None), 0.0)
        self._clocks = [first if clock is None else clock for clock in clocks]
        self._ends = [clock - first for clock in [*self._clocks[1:], self._clocks[-1]]]
        self._starts = [clock - first for clock in self._clocks]
        self._at = 0  # token at which the next span begins

    def add(self, number: int, step: Mapping[str, Any]) -> None:
        """Adds a step; the messages up to the question are no spans."""
        message = _text(step["message"])
        if step["source"] != "agent":
            if number > self._question_at:
                self._span(step["source"], Author.ENVIRONMENT, f"{message}\n", message)
        else:
            self._act(number, step, message)
        for result in _results(step):
            content = _text(result.get("content") or "")
            head, tail = hermes.Hermes.head, hermes.Hermes.tail
            self._span("observation", Author.ENVIRONMENT, f"{head}{content}{tail}", content)

    def _act(self, number: int, step: Mapping[str, Any], message: str) -> None:
        metrics, thought = step.get("metrics") or {}, step.get("reasoning_content")
        if self.tokens[0] and metrics.get("completion_token_ids"):
            self._at = len(metrics["prompt_token_ids"])
        tokens = len(metrics.get("completion_token_ids") or ()) if self.tokens[0] else 0
        if thought:
            self._span(THINK, Author.POLICY, f"<think>\n{thought}\n</think>\n\n", thought, tokens)
            tokens = 0
        calls = step.get("tool_calls") or ()
        if message.strip():
            role = "answer" if number == self._last and not calls else None
            self._span(role, Author.POLICY, message, message, tokens)
            tokens = 0
        result_of = {result.get("source_call_id"): result for result in _results(step)}
        for call in calls:
            name, arguments = call["function_name"], call["arguments"]
            body = json.dumps(arguments, ensure_ascii=False)
            self._span(name, Author.POLICY, hermes.call_text(name, arguments), body, tokens)
            tokens, result = 0, result_of.get(call["tool_call_id"])
            failed = (result is None) or bool((result.get("extra") or {}).get("is_error"))
            content = "" if result is None else _text(result.get("content") or "")
            outcome, times = "error" if failed else "ok", (self._starts[number], self._ends[number])
            self.calls.append(ToolCall(name, body, content, outcome, not failed, *times))

    def _span(
        self, role: str | None, author: Author, text: str, content: str, tokens: int = 0
    ) -> None:
        start, self._at = self._at, self._at + tokens
        self.spans.append(SegmentSpan(role, author, text, start, self._at, content))


def _clock(step: Mapping[str, Any]) -> float | None:
    """Returns the time stamp of a step in seconds; None if it has none that can be read."""
    try:
        when = datetime.datetime.fromisoformat(step["timestamp"].replace("Z", "+00:00"))
    except (KeyError, AttributeError, ValueError):
        return None
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def chat_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an ATIF document (see `to_atif`) to a row of chat messages, as in OpenAI's API.

    Steps of the agent that are marked as copies of earlier steps (``is_copied_context``) are left
    out. A step that no model wrote (``llm_call_count`` 0) is marked as excluded from training.

    Raises:
        KeyError, TypeError, ValueError: the document is malformed.
        Unusable: a result has no text, but a reference to the trajectory of a subagent.
    """
    messages = list[dict[str, Any]]()
    for step in _checked(document):
        by_agent = step["source"] == "agent"
        if by_agent and step.get("is_copied_context"):
            continue
        role = "assistant" if by_agent else step["source"]
        message: dict[str, Any] = {"role": role, "content": step["message"]}
        if thought := step.get("reasoning_content"):
            message["reasoning_content"] = thought
        if calls := step.get("tool_calls"):
            message["tool_calls"] = [_function(call) for call in calls]
        if step.get("llm_call_count") == 0:
            message["weight"] = 0
        messages.append(message)
        for result in _results(step):
            content, identity = result.get("content") or "", result.get("source_call_id")
            if not content and result.get("subagent_trajectory_ref"):
                raise Unusable(
                    "a result is only in the trajectory of a subagent (subagent_trajectory_ref)"
                )
            answer: dict[str, Any] = {"role": "tool", "content": content}
            if (result.get("extra") or {}).get("is_error"):
                answer["is_error"] = True
            messages.append(answer if identity is None else {**answer, "tool_call_id": identity})
    extra = document.get("extra") or {}
    row = {name: extra[name] for name in ("gold", "answer") if name in extra}
    for name in ("session_id", "trajectory_id"):
        if document.get(name):
            row["id"] = str(document[name])
    totals = document.get("final_metrics") or {}
    names = {f"{kind}_tokens": f"total_{kind}_tokens" for kind in ("prompt", "completion")}
    if usage := {name: totals[key] for name, key in names.items() if key in totals}:
        row["usage"] = usage
    tools = document["agent"].get("tool_definitions")
    return {**row, **({"tools": tools} if tools else {}), "messages": messages}


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


# --- checks --------------------------------------------------------------------------------


def _checked(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a document after a check of all fields that this module reads.

    Raises:
        TypeError, ValueError: a field is missing, or has the wrong type.
    """
    steps = _field(document, "steps", list, "the document")
    _field(document, "extra", dict, "the document")
    agent = _field(document, "agent", dict, "the document")
    _field(_field(document, "final_metrics", dict, "the document") or {}, "extra", dict, "the end")
    if not steps or not agent:
        raise ValueError("the document has no steps or no agent")
    for number, step in enumerate(steps, 1):
        where = f"step {number}"
        if not isinstance(step, dict):
            raise TypeError(f"{where} cannot be {type(step).__name__}")
        if step.get("step_id") != number:
            raise ValueError(f"{where} has the step_id {step.get('step_id')!r}: steps are missing")
        if step.get("source") not in ("system", "user", "agent"):
            raise ValueError(f"{where} has the unknown source {str(step.get('source'))[:40]!r}")
        if _field(step, "message", (str, list), where) is None:
            raise ValueError(f"{where} has no message")
        _field(step, "reasoning_content", str, where)
        names = set(_calls(step, where))
        for result in _items(_field(step, "observation", dict, where) or {}, "results", where):
            _field(result, "content", (str, list), f"a result of {where}")
            _field(result, "extra", dict, f"a result of {where}")
            source = _field(result, "source_call_id", str, f"a result of {where}")
            if source is not None and names and source not in names:
                raise ValueError(f"{where} has a result of the call {source!r}, which is not there")
        _check_metrics(_field(step, "metrics", dict, where) or {}, where)
    return list(steps)


def _calls(step: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the id of each tool call of a step."""
    for call in _items(step, "tool_calls", where):
        for name, kind in (("tool_call_id", str), ("function_name", str), ("arguments", dict)):
            if _field(call, name, kind, f"a call of {where}") is None:
                raise ValueError(f"a call of {where} has no {name!r}")
        _field(call, "extra", dict, f"a call of {where}")
        yield call["tool_call_id"]


def _check_metrics(metrics: Mapping[str, Any], where: str) -> None:
    ids = _field(metrics, "completion_token_ids", list, where)
    logs = _field(metrics, "logprobs", list, where)
    for values in (ids, _field(metrics, "prompt_token_ids", list, where)):
        if not {type(value) for value in values or ()} <= {int}:
            raise TypeError(f"{where}: a token id is not a whole number")
    if not {type(value) for value in logs or ()} <= {int, float}:
        raise TypeError(f"{where}: a log-probability is not a number")
    if logs is not None and ids is not None and len(logs) != len(ids):
        raise ValueError(f"{where} has {len(logs)} logprobs for {len(ids)} tokens")


def _items(holder: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Returns the objects in a list, which may be missing."""
    items = _field(holder, name, list, where) or []
    if not all(isinstance(item, dict) for item in items):
        raise TypeError(f"{where}: an item of {name!r} is not an object")
    return list(items)


def _field(holder: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    """Returns an optional field of an object; None if it is missing."""
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{where}: the field {name!r} cannot be {type(value).__name__}")
    return value


def _results(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    return (step.get("observation") or {}).get("results") or []


def _text(content: Any) -> str:
    """Returns the text of a message or of a result, which may have images and sounds."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict):
            raise TypeError(f"a part of a message cannot be {type(part).__name__}")
        source = part.get("source")
        path = source.get("path") if isinstance(source, dict) else None
        parts.append(str(part.get("text") or f"[{part.get('type')} {path}]"))
    return "\n".join(parts)
