"""Reads logs of conversations: messages of a user, of one or several agents, and of tools.

The messages may have any shape that `coa_jax.distillation.readers.message_formats` knows. A run is
a list of messages, an object with such a list, or the lines of a session that share its id.
Sessions of Claude Code and Codex and traces of OpenAI's Agents SDK are recognised by their fields.
docs/data.md describes the forms.

The result of a call is the message of the same turn with the id of the call. Parallel calls are
written one after another. If the last call is ``final_answer``, its argument is the answer.
Otherwise the answer is searched in the last message, see `coa_jax.distillation.readers.answers`. If
a sentence without a mark states an accepted answer, the metadata have ``answer_from: "sentence"``.
A step of ReAct, whose call is text, is read if a message has no other step. A text that mixes the
words of an agent with results in another way is refused. A message of an agent whose name says that
it plans or reviews is a plan or a reflection. All other text of agents becomes thoughts.

The format lacks:

- plans, reflections and verifications of a single agent, which become thoughts;
- thoughts of a reasoning model, unless the log has them;
- whether a tool failed, unless the log says so;
- text after a marked answer, a call of ``final_answer`` that failed, and what Pydantic AI replies
  to a text that is not the structured output it wants;
- calls whose arguments are not valid JSON, for example because they are truncated, and calls that
  ran at the provider, whose results are not in the log (such a run is rejected);
- token counts of a run with several calls of the model, unless the log states them for the run or
  for every reply;
- images and sound in messages.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coa_jax.data.names import GOLD
from coa_jax.distillation.messages import Kind
from coa_jax.distillation.readers.answers import marked_answer, stated_answer
from coa_jax.distillation.readers.base import (
    Conversation,
    Field,
    Found,
    Line,
    Malformed,
    Session,
    Trace,
    read_sessions,
    total_usage,
)
from coa_jax.distillation.readers.message_formats import (
    Call,
    Turn,
    first_present,
    is_message,
    turns_of,
)
from coa_jax.distillation.readers.tool_calls import offered_functions
from coa_jax.tasks.grading import grade_answer

_LISTS = (
    *("messages", "conversation", "conversations", "history", "chat_history", "chat", "steps"),
    *("intermediate_steps", "events", "trajectory", "trace", "turns", "log", "items", "contents"),
)
"""Usual names of the list of messages in an object that is a run."""

_PAIRS = ({"request", "response"}, {"input", "output"}, {"input", "response"})
"""Names of a request to a model and of its reply, in an object that is a run."""

_QUESTION = ("question", "task", "query", "problem", "prompt", "input", "instruction", "goal")
_GOLD = (*GOLD, "reference", "target", "label")  # in training data, the last may be other things
_TOOLS = ("tools", "functions", "tool_calls")
"""Names of lists of tools, whose items look like messages."""

_PREDICTION = ("final_answer", "prediction", "predicted_answer", "final_output")
_ANSWER = ("answer", "result", "output", "response")
_ID = ("id", "task_id", "run_id", "uid", "question_id", "thread_id", "trace_id")
_SESSION = (
    *("sessionId", "session_id", "session", "thread_id", "conversation_id", "trace_id", "run_id"),
    *("run", "episode", "task_id"),
)
_CONTEXT = re.compile(r"\s*(?:<(?:environment_context|user_instructions|system-reminder|command-"
                      r"|local-command-)|# AGENTS\.md instructions)")  # fmt: skip
"""Matches messages of the role ``user`` that a coding agent writes, and not its user."""

_PLANS = re.compile(r"plan(?!et)", re.IGNORECASE)
_REVIEWS = re.compile(r"critic|review|reflect", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a log says about a run besides its messages; "" or () for what the log does not say.

    Attributes:
        question: the question of the user.
        answer: the final answer of the run.
        gold: accepted answers.
        identity: id of the run.
        offered: functions that the log describes, see `offered_functions`.
    """

    question: str = ""
    answer: str = ""
    gold: tuple[str, ...] = ()
    identity: str = ""
    offered: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def facts_of(fields: Field) -> Facts:
    """Reads the question, the answers and the id of a run, under any of their usual names.

    Accepted answers may also stand in the object ``metadata``.
    """
    value = fields.mapping()
    predicted, answered = first_present(fields, _PREDICTION), first_present(fields, _ANSWER)
    about = fields.get("metadata")
    gold = first_present(fields, _GOLD) or (
        first_present(about, _GOLD) if isinstance(about.value, dict) else Field(None)
    )
    if predicted and not gold and answered and "answer" in value:
        gold, answered = fields["answer"], Field(None)  # the answer is that of a data set
    answer = predicted or answered
    question = next((q.value for q in map(fields.get, _QUESTION) if isinstance(q.value, str)), "")
    return Facts(
        question.strip(),
        answer.scalar().strip() if answer and not isinstance(answer.value, list | dict) else "",
        gold.answers(),
        next((str(i.value) for i in map(fields.get, _ID) if isinstance(i.value, int | str)), ""),
        _offered(value),
    )


def _offered(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    request = run.get("request")
    for part in (run, request if isinstance(request, dict) else {}):
        if functions := offered_functions(part.get("tools") or part.get("functions")):
            return functions
    return {}


# --- one run ---------------------------------------------------------------------------------


def is_run(value: Any) -> bool:
    """Returns whether a JSON value holds the messages of a run: as a list, or in an object."""
    if isinstance(value, list):
        return bool(value) and are_messages(value)
    return is_run_object(value)


def are_messages(values: Iterable[Any]) -> bool:
    """Returns whether JSON values are messages of a run, and not runs."""
    return all(is_message(value) and not is_run_object(value) for value in values)


def is_run_object(value: Any) -> bool:
    """Returns whether a JSON value is an object that holds the messages of a run."""
    if not isinstance(value, dict):
        return False
    both = any(pair <= value.keys() for pair in _PAIRS)
    return bool(_list_name(value)) or (both and isinstance(_outputs(value), list))


def _list_name(value: dict[str, Any]) -> str | None:
    """Returns the name of the list of messages in an object; None if it has no such list.

    Without a usual name, the list is the only one whose items all look like messages.
    """
    lists = {name: items for name, items in value.items() if items and isinstance(items, list)}
    usual = next(filter(lists.__contains__, _LISTS), None)
    if usual or is_message(value):
        return usual
    found = [
        name for name, items in lists.items() if name not in _TOOLS and all(map(is_message, items))
    ]
    return found[0] if len(found) == 1 and found[0] not in (*_QUESTION, *_ANSWER) else None


def is_record(value: Any) -> bool:
    """Returns whether a JSON value is a run, or a line of a session."""
    if is_run(value) or is_message(value):
        return True
    wrappers = ("message", "payload", "span_data")
    return isinstance(value, dict) and (
        _updates(value) is not None
        or any(isinstance(value.get(name), dict) for name in wrappers)
        or value.get("object") == "trace"
    )


def _outputs(value: dict[str, Any]) -> Any:
    response = value.get("response", value)
    return response.get("output", response.get("choices")) if isinstance(response, dict) else None


def read_run(record: Any) -> Trace:
    """Converts a run (the JSON value of one line) to a trace.

    Raises:
        Malformed: the record cannot be converted; the message says why.
    """
    fields = Field({"messages": record} if isinstance(record, list) else record)
    messages = _messages(fields)
    turns = [turn for message in messages for turn in turns_of(message)]
    facts = facts_of(fields)
    if "response" in fields.mapping() and isinstance(fields["response"].value, dict):
        response = fields["response"]
        identity = facts.identity or response.get("id").optional_scalar()
        facts = dataclasses.replace(facts, identity=identity)
        counts = fields.get("usage") or response.get("usage")
        # The response counts only the last call of the model.
        alone = all(turn.role != "assistant" for turn in turns[:-1])
        counts = counts if fields.get("usage") or alone else Field(None)
    else:
        counts = fields.get("usage")
    usage = total_usage([counts.value], "prompt_tokens", "completion_tokens") or total_usage(
        [counts.value], "input_tokens", "output_tokens"
    )
    return trace_of(turns, facts, usage)


def _messages(fields: Field) -> list[Field]:
    value = fields.mapping()
    request = fields["request"] if isinstance(value.get("request"), dict) else fields
    name = _list_name(request.mapping())
    listed = name or ("input" if isinstance(request.get("input").value, list) else None)
    messages = request[listed].items("message") if listed else []
    if not listed and isinstance(request.get("input").value, str):
        messages = [Field({"role": "user", "content": request["input"].value}, "message 0")]
    outputs = fields.get("response") if "response" in value else fields
    if not isinstance(outputs.value, dict):
        outputs = Field({})
    if name is None and isinstance(outputs.get("output").value, list):
        messages += outputs["output"].items("output")
    elif "request" in value:
        choices = outputs["choices"].items("choice")
        if not choices:
            raise Malformed("the response has no choice")
        messages.append(Field(choices[0]["message"].value, f"message {len(messages)}"))
    elif not messages:
        request[_LISTS[0]].items("message")  # says what is missing
    return messages


def trace_of(turns: Iterable[Turn], facts: Facts, usage: dict[str, int] | None = None) -> Trace:
    """Converts the turns of a run to a trace.

    Args:
        turns: the turns in order.
        facts: what the log says about the run besides its messages.
        usage: token counts of the run; None or {} to add up those of the turns.

    Raises:
        Malformed: the question, or the result of a tool call, is missing; or the turns belong to
            several questions.
    """
    spoken = _joined((turn for turn in turns if turn.role != "system"), facts.question)
    question_at = next((n for n, turn in enumerate(spoken) if turn.role == "user"), None)
    if question_at is None and not facts.question:
        raise Malformed("no message of the role 'user', so no question")
    begin = 0 if question_at is None else question_at + 1
    talk = Conversation(facts.question or spoken[begin - 1].words)
    _paired((), _results(spoken[begin:]))
    final: str | None = None
    metadata = dict[str, Any]()
    for number, turn in enumerate(spoken[begin:], start=begin):
        if turn.role == "user":
            raise Malformed("a second message of the role 'user': no run of a single question")
        if turn.role != "assistant":
            continue
        if final is not None:
            raise Malformed("the conversation goes on after final_answer")
        thought = "\n".join(filter(None, (turn.reasoning, turn.words)))
        returned = _paired(turn.calls, _results(spoken[number + 1 :]))
        for (_, tool, arguments), result in zip(turn.calls, returned, strict=True):
            if _is_final(tool):
                final = final if result and not result.ok else _final(arguments)
                continue
            assert result
            talk.call(tool, arguments, result.words, result.ok, thought)
            thought = ""
        if final is not None or turn.calls:
            talk.add_thought(thought)
        elif number == len(spoken) - 1:
            marked = marked_answer(turn.words)
            told = "" if marked or facts.answer else turn.words
            stated = stated_answer(told, talk.messages[0].content)
            if stated and grade_answer(stated, facts.gold):
                marked, metadata = (turn.words, stated), {"answer_from": "sentence"}
            before, final = marked or ("", turn.words.strip())
            before = turn.words if facts.answer else before
            talk.add_thought("\n".join(filter(None, (turn.reasoning, before))))
        else:
            _say(talk, turn, thought)
    if facts.answer or final:
        talk.answer(facts.answer or final or "")
    counts = usage or total_usage((t.usage for t in spoken), "input_tokens", "output_tokens")
    log = talk.finish(facts.identity)
    return Trace(log, facts.gold, metadata, usage=counts, offered=facts.offered)


def _say(talk: Conversation, turn: Turn, thought: str) -> None:
    """Adds text of an agent, as a plan or a reflection if the name of the agent says so."""
    if _PLANS.search(turn.speaker) and turn.words:
        talk.plan(turn.words, turn.reasoning)
    elif _REVIEWS.search(turn.speaker) and turn.words:
        talk.add(Kind.REFLECTION, "reflection", "manager", turn.words, turn.reasoning)
    else:
        talk.add_thought(thought)


def _joined(turns: Iterable[Turn], question: str) -> list[Turn]:
    """Joins the parts of one reply, and leaves out what ends a conversation without words."""
    spoken = list[Turn]()
    for turn in turns:
        asks = not spoken and question in ("", turn.words.strip())
        if spoken and turn.role == "user" and turn.words.lstrip().startswith("Observation:"):
            turn = Turn("tool", turn.words.partition(":")[2].strip())  # of a step of ReAct
        if turn.role == "user" and turn.speaker and not asks:
            # An agent speaks in the place of the user.
            turn = dataclasses.replace(turn, role="assistant")
        words = turn.words.strip().removesuffix("TERMINATE").strip()
        if turn.role == "assistant":
            if not (words or turn.reasoning or turn.calls):
                continue
            turn = dataclasses.replace(turn, words=words)
        last = spoken[-1] if spoken else turn
        if spoken and turn.role == "assistant" and turn.identity == last.identity != "":
            raise Malformed("pieces of a streamed reply: log whole messages instead")
        if spoken and turn.role == last.role == "assistant" and turn.partial and last.partial:
            spoken[-1] = dataclasses.replace(
                last,
                words="\n".join(filter(None, (last.words, words))),
                reasoning="\n".join(filter(None, (last.reasoning, turn.reasoning))),
                calls=(*last.calls, *turn.calls),
            )
        else:
            spoken.append(turn)
    return spoken


def _results(following: Sequence[Turn]) -> list[Turn]:
    """Returns the results before the next turn of an agent."""
    return list(itertools.takewhile(lambda turn: turn.role == "tool", following))


def _paired(calls: Sequence[Call], results: Sequence[Turn]) -> list[Turn | None]:
    """Returns the result of each call of a turn; ``final_answer`` may have no result (None).

    Several turns may use the same ids. Calls of one turn with the same id are paired with results
    in their order.
    """
    waiting: dict[str, list[Turn]] = {identity: [] for identity, _, _ in calls}
    for result in results:
        if result.identity not in waiting:
            raise Malformed(f"a result of the call {result.identity!r}, which is not there")
        waiting[result.identity].append(result)
        if len(waiting[result.identity]) > sum(result.identity == i for i, _, _ in calls):
            raise Malformed(f"two results of the call {result.identity!r}")
    returned: list[Turn | None] = []
    for identity, tool, _ in calls:
        if not waiting[identity] and not _is_final(tool):
            raise Malformed(f"no result of the call {identity!r} in the messages right after it")
        returned.append(waiting[identity].pop(0) if waiting[identity] else None)
    return returned


def _is_final(tool: str) -> bool:
    return tool.lower().replace("_", "") == "finalanswer"


def _final(arguments: Any) -> str:
    if isinstance(arguments, dict):
        only = next(iter(arguments.values())) if len(arguments) == 1 else None
        arguments = arguments.get("answer", only)
    return Field(arguments, "the answer of final_answer").scalar().strip()


# --- sessions: runs that are spread over several lines ---------------------------------------


@dataclasses.dataclass
class _ChatSession(Session):
    """The turns and facts of a session.

    In a trace of the Agents SDK, `spans` maps the id of each span to the id of its parent and its
    type, and `generations` maps the id of each agent to its newest request with the reply, in
    the order of time.
    """

    turns: list[Turn] = dataclasses.field(default_factory=list)
    facts: Facts = dataclasses.field(default_factory=Facts)
    spans: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    generations: dict[str, list[Field]] = dataclasses.field(default_factory=dict)
    is_trace: bool = False

    def add(self, record: Field) -> bool:
        """Reads one line; returns whether it belongs to the run."""
        value = record.mapping()
        if "span_data" in value or value.get("object") == "trace":
            return self._span(record)
        if "message" in value and isinstance(value["message"], dict):  # Claude Code
            return self._claude(record)
        if isinstance(value.get("payload"), dict):  # Codex
            return value.get("type") == "response_item" and self._item(record["payload"])
        if (updates := _updates(value)) is not None:  # LangGraph
            return any([self._item(Field(item, "a message")) for item in updates])
        if is_message(value):
            return self._item(record)
        facts = facts_of(record)
        new = {k: v for k, v in vars(facts).items() if v and k != "identity"}
        asked = self.facts.question
        if asked and new.get("question", asked) != asked:
            raise Malformed(
                "a second question in the session: give each run a 'session_id' of its own"
            )
        self.facts = dataclasses.replace(self.facts, **new)
        return bool(new)

    def _item(self, message: Field) -> bool:
        new = turns_of(message)
        new = [t for t in new if not (t.role == "user" and _CONTEXT.match(t.words))]
        self.turns += new
        return bool(new)

    def _claude(self, record: Field) -> bool:
        if record.get("isMeta").value or record.get("type").value not in ("user", "assistant"):
            return False
        if record["message"].get("model").value == "<synthetic>":
            return False  # words of the program, such as an error of the API
        size = len(self.turns)
        used = self._item(record["message"])
        self.turns[size:] = [dataclasses.replace(t, partial=True) for t in self.turns[size:]]
        return used

    def _span(self, record: Field) -> bool:
        self.is_trace = True
        data = record.get("span_data")
        if not data:
            return True
        kind, parent = data.get("type").value, record.get("parent_id").optional_scalar()
        self.spans[record.get("id").optional_scalar()] = parent, str(kind)
        if kind == "generation":
            prompt = data["input"].items("message")
            self.generations.pop(parent, None)
            self.generations[parent] = [*prompt, *data["output"].items("output")]
        return True

    def _is_inner(self, span: str) -> bool:
        """Returns whether an agent works for a guardrail or as the tool of another agent."""
        seen = set[str]()
        while span in self.spans and span not in seen:
            seen.add(span)
            span, kind = self.spans[span]
            if kind in ("guardrail", "function"):
                return True
        return False

    def trace(self) -> Trace:
        """Returns the trace of the session."""
        turns = self.turns
        outer = [made for span, made in self.generations.items() if not self._is_inner(span)]
        if outer:
            turns = [turn for message in outer[-1] for turn in turns_of(message)]
        elif self.is_trace:
            raise Malformed(
                "the trace has no span of the type 'generation', and the other spans lack the text"
                " of the conversation: log result.to_input_list() instead"
            )
        return trace_of(turns, dataclasses.replace(self.facts, identity=self.name))


def _updates(value: dict[str, Any]) -> list[Any] | None:
    """Returns the messages that a node of LangGraph adds; None for another line."""
    inner = next(iter(value.values())) if len(value) == 1 else None
    added = inner.get("messages") if isinstance(inner, dict) else None
    added = [added] if is_message(added) else added
    return added if isinstance(added, list) else None


def _session_of(record: Field) -> str | None:
    """Returns the id of the session to which a line belongs; None if the line is a whole run."""
    if isinstance(record.value, list) or is_run_object(record.value):
        return None
    value = record.mapping()
    if value.get("object") == "trace":
        return record["id"].scalar()
    if isinstance(value.get("payload"), dict) or "sessionId" not in value:
        return first_present(record, _SESSION).optional_scalar()
    agent = value.get("agentId") if value.get("isSidechain") else None
    return f"{record['sessionId'].scalar()}{f':{agent}' if agent else ''}"


def read(lines: Iterable[Line]) -> Iterator[tuple[Line, Found, bool]]:
    """Converts the runs and sessions in the lines of a file to traces, see `base.TraceReader`."""
    return read_sessions(_newest(lines), _ChatSession, _session_of, _run)


def _run(record: Field) -> Trace | None:
    return None if record.value == [] else read_run(record.value)


def _newest(lines: Iterable[Line]) -> Iterator[Line]:
    """Empties each run that the next line repeats and continues.

    Such lines are the states of a graph after each step, or the requests to a model in their order.
    """
    last: Line | None = None
    for line in lines:
        if last is not None:
            before, after = _listed(last.value), _listed(line.value)
            repeated = before and len(before) < len(after) and after[: len(before)] == before
            yield Line(last.number, []) if repeated else last
        last = line
    if last is not None:
        yield last


def _listed(value: Any) -> list[Any]:
    """Returns the messages of a run, as JSON values; [] for a value that is no run."""
    try:
        return [message.value for message in _messages(Field(value))] if value else []
    except Malformed:
        return []
