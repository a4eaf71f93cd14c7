r"""Implements the format ``react`` (ReAct, Yao et al., arXiv 2210.03629).

Each line begins with a mark that names the kind of the line:

    Thought: I search for the river.
    Action: wiki_search
    Action Input: longest river of Lesotho
    Observation: ... written by the environment, masked in every loss ...
    Thought: The passage names it.
    Final Answer: Orange River

The tool runs when the policy has written ``Observation:``, and its result follows in the same turn.
The answer is the text from ``Final Answer:`` to the end of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from coa_jax.protocol.arguments import describe
from coa_jax.protocol.built_in import BUILT_IN
from coa_jax.protocol.formats import BAD_CALL, EpisodeStep, Format, Protocol, Segment
from coa_jax.protocol.prompts import answer_rule
from coa_jax.protocol.spec import THINK
from coa_jax.protocol.text_buffer import Pieces, undecided

_MARKS = ("Thought:", "Action:", "Action Input:", "Observation:", "Final Answer:")
_MARK = re.compile("^(" + "|".join(_MARKS) + ")", re.MULTILINE)
_NEXT = {
    "": ("Thought:", "Action:", "Final Answer:"),
    "Thought:": ("Action:", "Final Answer:"),
    "Action:": ("Action Input:",),
    "Action Input:": ("Observation:",),
}
"""Mark -> the marks that may follow it."""
_INSTRUCTIONS = """\
Solve the task below step by step, with these tools:
{tools}

Write each step in these lines, and nothing else:
Thought: what you conclude, and what to do next
Action: the tool, one of {names}
Action Input: what the tool is given
Observation:

The result follows there; never write it yourself. In the end write:
Thought: why you know the answer
Final Answer: the answer

{answer}"""


class React(Format):
    """The conversation format ``react``: lines with marks such as ``Thought:`` and ``Action:``."""

    head, tail = " ", "\n"

    def reader(self, protocol: Protocol) -> ReactReader:
        """Returns a new parser of the policy's text in this format."""
        return ReactReader(protocol)

    def write(
        self, protocol: Protocol, steps: Sequence[EpisodeStep]
    ) -> tuple[tuple[str, str], ...]:
        """Writes the steps of an episode as text, see `Format.write`.

        All thoughts of a step are written into one ``Thought``.
        """
        parts = []
        for step in steps:
            thoughts = "\n".join(thought.strip() for thought in step.thoughts if thought.strip())
            text = f"Thought: {_indented(thoughts)}\n" if thoughts else ""
            body = _indented(step.text.strip())
            if step.tool:
                text += f"Action: {step.tool}\nAction Input: {body}\nObservation:"
            elif step.text:
                text += f"Final Answer: {body}"
            parts.append(("policy", text))
            if step.tool:
                parts.append(("environment", f"{self.head}{step.observation}{self.tail}"))
        return tuple(parts)

    def instructions(self, protocol: Protocol, brief: bool) -> str:
        """Returns the instructions that precede the question, see `Format.instructions`."""
        if brief:
            return f"Answer by ReAct with {', '.join(protocol.tools)}."
        tools = []
        for tool in protocol.tools:
            known, takes = BUILT_IN.get(tool), ""
            if known and not (known.form == "text" and tool in protocol.described):
                takes = f" The input is {known.takes}."
            tools.append(f"- {tool}: {describe(protocol, tool)}{takes}")
        return _INSTRUCTIONS.format(
            tools="\n".join(tools), names=", ".join(protocol.tools), answer=answer_rule(protocol)
        )

    def error(self, protocol: Protocol, segment: Segment) -> str:
        """Returns the observation for a call of a tool that does not exist, see `Format.error`."""
        tools = ", ".join(protocol.tools)
        return f"There is no tool {segment.body[:100]!r}; there are {tools}."


def _indented(text: str) -> str:
    """Returns a text whose lines do not begin with a mark, which would end the text."""
    return _MARK.sub(r" \1", text)


class ReactReader(Pieces):
    """Parser of the format ``react``, see `coa_jax.protocol.formats.Reader`."""

    def __init__(self, protocol: Protocol):
        super().__init__(protocol)
        self._mark = ""  # the mark before the current text
        self._begins = 0  # length of the text up to the end of this mark
        self._tool = ""
        self._line_start = True

    @property
    def open_role(self) -> str | None:
        """Role of the segment that is being read; None while unknown, see `Reader.open_role`."""
        return {"Thought:": THINK, "Final Answer:": self.protocol.answer}.get(self._mark)

    @property
    def open_body(self) -> str:
        """Body, as far as read, of the segment that is being read, see `Reader.open_body`."""
        return self.text[self._begins :].lstrip() if self.open_role else ""

    def feed(self, chunk: str) -> list[Segment]:
        """Parses more text; returns the segments that this text completes."""
        data, consumed, done = self.carry + chunk, 0, list[Segment]()
        self.carry = ""
        # A mark counts only at the start of a line. If the data does not begin at the start of a
        # line, a character before the data keeps the pattern from matching there.
        searched = ("" if self._line_start else "\0") + data
        added = len(searched) - len(data)
        for match in _MARK.finditer(searched):
            start, end = match.start() - added, match.end() - added
            if self._mark == "Final Answer:":
                at = self.end + start - consumed
                self.broken("after_answer", f"{match[0]} behind the answer", at)
                continue
            self.text += data[consumed:start]
            done += self._marked(match[0])
            consumed = end
        line = data.rfind("\n") + 1
        begins = consumed <= line and (line > 0 or self._line_start)
        last = data[max(line, consumed) :]
        if begins and undecided(last, _MARKS) == len(last):
            self.carry = last
        self._line_start = begins and (not last or bool(self.carry))
        self.text += data[consumed : len(data) - len(self.carry)]
        return done

    def _marked(self, mark: str) -> list[Segment]:
        """Ends the text before a mark; returns the segments that this completes."""
        last, done = self._mark, list[Segment]()
        body = self.text[self._begins :].strip()
        if mark not in _NEXT[last]:
            kind = "forged_observation" if mark == "Observation:" else "transition"
            self.broken(kind, f"{mark} may not follow {last or 'this'}")
        if last == "" and body:
            self.broken("stray_text", f"text before {mark}", self.start)
        if last == "Action Input:" and mark == "Observation:":
            self.text += mark
            is_tool = self._tool in self.protocol.tools
            if not is_tool:
                self.broken("bad_call", f"there is no tool {self._tool[:100]!r}", self.start)
            self._mark, self._begins = "", 0
            return self.close(self._tool, body) if is_tool else self.close(BAD_CALL, self._tool)
        if last == "Action:" and mark == "Action Input:":
            self._tool = body
        elif last == "Thought:":
            done = self.close(THINK, body)
        else:
            done = self.close()
        self.text += mark
        self._mark, self._begins = ("" if mark == "Observation:" else mark), len(self.text)
        return done

    def interrupt(self) -> None:
        """Tells the parser that a tool has answered. The policy's next text begins a new line."""
        super().interrupt()
        self._line_start = True

    def end_turn(self) -> list[Segment]:
        """Tells the parser that the policy's turn has ended; returns the segments that end here."""
        super().interrupt()
        if self._mark == "Final Answer:":
            done = self.answer(self.text[self._begins :].strip())
            self._mark, self._begins = "", 0
            return done
        return self.finish()

    def finish(self) -> list[Segment]:
        """Ends the parsing, even within a turn; returns the segments of the remaining text."""
        super().interrupt()
        if self._mark:
            self.broken("unclosed", f"{self._mark} is never ended", self.start)
        elif self.text.strip():
            self.broken("stray_text", "text that belongs to no part", self.start)
        self._mark, self._begins = "", 0
        return self.close()
