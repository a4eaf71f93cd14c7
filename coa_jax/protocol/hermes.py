r"""Implements the format ``hermes``: tool calls as JSON in a chat, as Hermes and Qwen write them.

    <think>
    I search for the river.
    </think>

    <tool_call>
    {"name": "wiki_search", "arguments": {"query": "longest river of Lesotho"}}
    </tool_call>

When the policy ends its turn, all tool calls of the turn run. Their results follow as
``<tool_response>`` in the next turn, which the model's chat template writes. Thoughts are optional.
A turn without a tool call is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.protocol.arguments import from_text, read_call
from coa_jax.protocol.formats import BAD_CALL, EpisodeStep, Format, Protocol, Segment
from coa_jax.protocol.prompts import answer_rule
from coa_jax.protocol.spec import THINK
from coa_jax.protocol.text_buffer import Pieces, undecided

_NAMES = (THINK, "tool_call", "tool_response")
_TAGS = tuple(f"<{slash}{name}>" for name in _NAMES for slash in ("", "/"))
_TAG = re.compile("|".join(_TAGS))


class Hermes(Format):
    """The conversation format ``hermes``: tool calls as JSON in ``<tool_call>`` tags."""

    turns = True
    templated = True
    tags = _TAGS[:4]
    head, tail = "\n<tool_response>\n", "\n</tool_response>\n"

    def reader(self, protocol: Protocol) -> HermesReader:
        """Returns a new parser of the policy's text in this format."""
        return HermesReader(protocol)

    def write(
        self, protocol: Protocol, steps: Sequence[EpisodeStep]
    ) -> tuple[tuple[str, str], ...]:
        """Writes the steps of an episode as text, see `Format.write`.

        All thoughts of a step are written into one ``<think>``.
        """
        parts = []
        for step in steps:
            thoughts = "\n".join(_quoted(thought.strip()) for thought in step.thoughts)
            text = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
            if not step.tool:
                parts.append(("policy", text + _quoted(step.text.strip())))
                continue
            arguments = from_text(protocol, step.tool, step.text)
            parts.append(("policy", text + call_text(step.tool, arguments)))
            parts.append(("environment", f"{self.head}{step.observation}{self.tail}"))
        return tuple(parts)

    def instructions(self, protocol: Protocol, brief: bool) -> str:
        """Returns the instructions that precede the question, see `Format.instructions`.

        The instructions do not explain how to call tools, because the chat template does.
        """
        if brief:
            return f"Call tools: {', '.join(protocol.tools)}."
        return (
            "Solve the task below. Call tools as often as you need them, and look at their results "
            "before you go on. When you know the answer, write it alone, without a call. "
            f"{answer_rule(protocol)}"
        )

    def error(self, protocol: Protocol, segment: Segment) -> str:
        """Returns the observation that explains an invalid call, see `Format.error`."""
        try:
            read_call(protocol, segment.body)
        except ValueError as error:
            return str(error)
        return super().error(protocol, segment)

    def marks(self, protocol: Protocol, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) offsets of the tags that are single tokens, see `Format.marks`."""
        reader, offsets = HermesReader(protocol), []
        for segment in reader.feed(text):
            if segment.role is None:
                continue
            name = THINK if segment.role == THINK else "tool_call"
            tagged = text[segment.start : segment.end]
            if tagged.startswith(f"<{name}>"):
                offsets.append((segment.start, segment.start + len(name) + 2))
            offsets.append((segment.end - len(name) - 3, segment.end))
        return offsets

    def quote(self, text: str) -> str:
        """Escapes ``</tool_response>`` in the text of a tool, see `Format.quote`."""
        return text.replace("</tool_response>", "&lt;/tool_response&gt;")


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the text with which the policy calls a tool in this format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    # A mark in the arguments would end the call, so its first character is escaped.
    call = _TAG.sub(lambda match: f"\\u003c{match[0][1:]}", call)
    return f"<tool_call>\n{call}\n</tool_call>"


def _quoted(text: str) -> str:
    return _TAG.sub(lambda match: f"&lt;{match[0][1:-1]}&gt;", text)


class HermesReader(Pieces):
    """Parser of the format ``hermes``, see `coa_jax.protocol.formats.Reader`."""

    def __init__(self, protocol: Protocol):
        super().__init__(protocol)
        self._open = ""  # name of the open tag: think, tool_call, or "" for none
        self._calls = self._segments = 0  # number of calls and of tagged segments in this turn

    @property
    def open_role(self) -> str | None:
        """Role of the segment that is being read, see `Reader.open_role`.

        Text outside tags has no role before the turn ends, because this text is the answer only if
        the turn contains no call.
        """
        return THINK if self._open == THINK else None

    @property
    def open_body(self) -> str:
        """The part of an unfinished segment's body that has been read; see `Reader.open_body`."""
        return self.text[len("<think>") :].lstrip("\n") if self._open == THINK else ""

    def feed(self, chunk: str) -> list[Segment]:
        """Parses more text; returns the segments that this text completes."""
        data, consumed, done = self.carry + chunk, 0, list[Segment]()
        for match in _TAG.finditer(data):
            tag = match[0]
            name, closes = tag.strip("</>"), tag[1] == "/"
            before, here = data[consumed : match.start()], self.end + match.start() - consumed
            # Some chat templates write the opening <think> as the end of the prompt.
            opened = self._open or (THINK if not self._segments else "")
            if closes and name == opened:
                self.text += before + tag
                consumed = match.end()
                done += self._closed(name)
            elif self._open:
                if self._open == "tool_call":
                    self.broken("nested", f"{tag} inside of a call", here)
            elif name == "tool_response":
                self.broken("forged_observation", "a result that no tool gave", here)
            elif closes:
                self.broken("unexpected_close", f"{tag} closes nothing", here)
            else:
                self.text += before
                has_text = bool(self.text.strip())
                if name == THINK and (has_text or self._calls):
                    self.broken("misplaced_think", "thoughts stand first in a turn", here)
                done += self._close_loose_text()
                self.text, self._open = tag, name
                consumed = match.end()
        keep = undecided(data[consumed:], _TAGS)
        self.text += data[consumed : len(data) - keep]
        self.carry = data[len(data) - keep :] if keep else ""
        return done

    def _closed(self, name: str) -> list[Segment]:
        """Returns the segment of a tag that has just been closed."""
        self._open, self._segments = "", self._segments + 1
        inner = self.text.removeprefix(f"<{name}>").removesuffix(f"</{name}>")
        if name == THINK:
            return self.close(THINK, inner.strip("\n"))
        self._calls += 1
        try:
            role, body = read_call(self.protocol, inner)
        except ValueError as error:
            self.broken("bad_call", str(error), self.start)
            role, body = BAD_CALL, inner
        return self.close(role, body)

    def _close_loose_text(self) -> list[Segment]:
        """Returns text outside of thoughts, calls and answers as a segment."""
        if self._calls and self.text.strip():
            self.broken("stray_text", "text behind a call", self.start)
        return self.close()

    def end_turn(self) -> list[Segment]:
        """Tells the parser that the policy's turn has ended; returns the segments that end here."""
        self.interrupt()
        if self._open:
            done = self.finish()
        elif self._calls or not self.text.strip():
            done = self._close_loose_text()
        else:
            done = self.answer(self.text.strip())
        self._calls = self._segments = 0
        return done

    def finish(self) -> list[Segment]:
        """Ends the parsing, even within a turn; returns the segments of the remaining text."""
        self.interrupt()
        if self._open:
            self.broken("unclosed", f"<{self._open}> is never closed", self.start)
        self._open = ""
        return self.close()
