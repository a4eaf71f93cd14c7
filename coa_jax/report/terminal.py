"""Shows a trajectory on the terminal while it is sampled: roles in colour, then statistics.

A segment is a part of the trajectory with one role, such as a thought or an observation.
Text of the policy and of tools is untrusted, so its control characters are replaced before it is
written to the terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from coa_jax.data.trajectory import Author, StopReason, ToolCall, Trajectory, trajectory_violations
from coa_jax.protocol import Protocol, Segment, make_parser
from coa_jax.rollout.request import Arrival

# The colours have a medium luminance, so they are legible on dark and on light backgrounds.
COLOURS = {
    "think": "#767676",
    "plan": "#8a63d2",
    "tool": "#0b7fc4",
    "code": "#0a8573",
    "observation": "#8f7430",
    "reflection": "#b06a00",
    "suggested_answer": "#b8489f",
    "double_check": "#cf4f16",
    "answer": "#1a8550",
    "question": "#767676",
    "fault": "#d6453b",
    "outside of tags": "#d6453b",
}
"""Colours of roles and lines. A role without an entry is a tool, with the colour ``tool``."""
MAX_FAULTS = 5
"""Maximum number of broken protocol rules that are listed below an answer."""

ANSWER = Style.parse("bold #ffffff on #1a7f4b")

# Matches characters that could control the terminal or reorder its text: control characters other
# than newline and tab, surrogates, and marks of the writing direction.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def clean(text: str) -> str:
    """Replaces control characters of an untrusted text, before it is written to a terminal.

    Such characters could move the cursor, change colours or reorder the text.
    """
    return _UNSAFE.sub("\ufffd", text.replace("\r", ""))


# --- reading the policy's text while it is written -----------------------------------------


class Piece(NamedTuple):
    """A piece of the text of a segment; a segment may arrive in several pieces.

    Attributes:
        role: role of the segment; None for text outside tags.
        text: text of the piece.
        last: whether this piece is the last one of its segment.
    """

    role: str | None
    text: str
    last: bool


class RoleStream:
    """Splits the policy's text into pieces of one role each, while the text arrives.

    The end of the text is held back if it may be the beginning of a tag.
    """

    def __init__(self, protocol: Protocol):
        self._protocol, self._parser = protocol, make_parser(protocol)
        self._shown = 0  # number of characters of the open segment's body that have been returned

    def feed(self, text: str) -> list[Piece]:
        """Adds text of the policy; returns the pieces that can be shown now."""
        pieces = self._closed(self._parser.feed(text))
        role, body = self._parser.open_role, self._parser.open_body
        if role is not None or body:
            pieces.append(Piece(role, body[self._shown :], False))
            self._shown = len(body)
        return pieces

    def observed(self) -> list[Piece]:
        """Returns the pieces that were held back; call this method before an observation."""
        form, pieces = self._protocol.format, list[Piece]()
        if form is not None:
            pieces = self._closed(self._parser.end_turn()) if form.turns else []
            self._parser.interrupt()
        return pieces

    def finish(self, ended: bool = True) -> list[Piece]:
        """Returns the rest of the policy's text as pieces; call this method after the last text.

        Args:
            ended: whether the policy ended its turn; False if the turn was cut off.
        """
        pieces = self._closed(self._parser.end_turn()) if ended else []
        return [*pieces, *self._closed(self._parser.finish())]

    def _closed(self, segments: Sequence[Segment]) -> list[Piece]:
        pieces = []
        for segment in segments:
            pieces.append(Piece(segment.role, segment.body[self._shown :], True))
            self._shown = 0
        return pieces


# --- the terminal --------------------------------------------------------------------------


class Paragraph:
    """Writes a paragraph to a terminal, with a margin on the left, and wraps lines between words.

    Blank lines before and after the paragraph are omitted.
    """

    def __init__(self, put: Callable[[str, bool], None], width: int | None):
        """Starts a paragraph.

        Args:
            put: function that writes text; its second argument says whether the text starts a line.
            width: width of a line in terminal cells; None to wrap no lines and to hold no word
                back.
        """
        self._put, self._width = put, width
        self._word = self._blanks = ""
        self._column = 0
        self._line_ends = 1  # before the first word

    def write(self, text: str) -> None:
        """Writes text, but holds the last word back until the word is complete."""
        for character in text:
            if not character.isspace():
                self._word += character
                continue
            self.end()
            if character == "\n":
                self._line_ends += 1
                self._blanks = ""
            else:
                self._blanks += "    " if character == "\t" else " "
        if self._width is None or len(self._word) >= self._width:
            self.end()

    def end(self) -> None:
        """Ends the paragraph: writes the word that is held back."""
        if not self._word:
            return
        text = self._blanks + self._word
        end = self._column + cell_len(text)
        full = self._width is not None and self._column > 0 and end > self._width
        if full and not self._line_ends:
            text = self._word
        # There is no empty line before the first word, and at most one before each later word.
        if self._line_ends > 1 and self._column:
            self._put("", True)
        begins = bool(self._line_ends or full)
        self._put(text, begins)
        self._column = cell_len(text) + (0 if begins else self._column)
        self._word, self._blanks, self._line_ends = "", "", 0


class Screen:
    """Shows the segments of a trajectory on a terminal, each below a line that names its role."""

    def __init__(self, stream: IO[str]):
        """Prepares to write to a stream, in colour if it is a terminal and NO_COLOR is not set."""
        console = Console(file=stream)
        self._stream, self._console = stream, console
        colour = console.is_terminal and not console.no_color
        self._system = COLOR_SYSTEMS.get(console.color_system or "") if colour else None
        ascii_only = console.options.ascii_only
        self._bars = ("| ", "  : ", "> ") if ascii_only else ("│ ", "  ║ ", "┃ ")
        self._paragraph: Paragraph | None = None

    def begin(self, name: str, note: str = "") -> None:
        """Starts a new segment: writes the line that names its role.

        Args:
            name: role of the segment.
            note: text that is shown after the role; "" for none.
        """
        self.end()
        bar = self._bars[{"observation": 1, "answer": 2}.get(name, 0)]
        colour = COLOURS.get(name, COLOURS["tool"])
        gutter, plain = Style(color=colour), Style()
        body = {"answer": ANSWER, "think": gutter, "observation": gutter}.get(name, plain)
        self._write("  " if name == "observation" else "", plain)
        self._write(name, Style(color=colour, bold=True))
        self._write(f"  {note}" if note else "", gutter)
        started = False

        def put(text: str, begins: bool) -> None:
            nonlocal started
            if begins:
                self._stream.write("\n")
                self._write(bar if text or started else "", gutter)
            started = True
            self._write(text, body)

        terminal = self._console.is_terminal
        width = max(20, self._console.width - len(bar) - 1) if terminal else None
        self._paragraph = Paragraph(put, width)

    def write(self, text: str) -> None:
        """Shows text of the segment that `begin` started; without such a segment, does nothing."""
        if self._paragraph is not None:
            self._paragraph.write(clean(text))
            self._stream.flush()

    def end(self) -> None:
        """Ends the segment that `begin` started, if there is one."""
        if self._paragraph is not None:
            self._paragraph.end()
            self._paragraph = None
            self._stream.write("\n")
            self._stream.flush()

    def line(self, text: str, name: str) -> None:
        """Ends the segment, and writes a line of its own in the colour of the role ``name``."""
        self.end()
        self._write(clean(text), Style(color=COLOURS[name]))
        self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str, style: Style) -> None:
        if text:
            coloured = self._system is not None and bool(style)
            self._stream.write(style.render(text, color_system=self._system) if coloured else text)


class Show:
    """Shows one trajectory on a terminal while the rollout samples it.

    Pass the method `arrive` to the rollout as ``on_text``.
    """

    def __init__(self, screen: Screen, protocol: Protocol):
        self._screen, self._roles = screen, RoleStream(protocol)
        self._open: str | None = None
        self._waiting = ""  # white space outside tags, which is shown only if other text follows

    def arrive(self, arrival: Arrival) -> None:
        """Shows new text of the policy or of a tool; the rollout calls it as ``on_text``."""
        if arrival.author == Author.POLICY:
            self._show(self._roles.feed(arrival.text))
        elif arrival.call is not None:
            self._show(self._roles.observed())
            self._observation(arrival.call)

    def finish(self, trajectory: Trajectory, seconds: float) -> None:
        """Shows the rest of the trajectory and its statistics.

        Args:
            trajectory: the finished trajectory.
            seconds: time that the trajectory took, in seconds.
        """
        ended = trajectory.stop_reason in (StopReason.ANSWER, StopReason.EOS)
        self._show(self._roles.finish(ended))
        for line, name in footer(trajectory, seconds):
            self._screen.line(line, name)

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            name, text = piece.role or "outside of tags", piece.text
            if piece.role is None and self._open is None:
                self._waiting += text
                text = self._waiting
                if not text.strip():
                    self._waiting = "" if piece.last else self._waiting
                    continue
            self._waiting = ""
            if self._open != name:
                self._screen.begin(name)
                self._open = name
            self._screen.write(text)
            if piece.last:
                self._screen.end()
                self._open = None

    def _observation(self, call: ToolCall) -> None:
        self._open = None
        note = f"{call.tool}  {max(0.0, call.end - call.start):.2f} s"
        self._screen.begin("observation", note if call.ok else f"{note}  {call.outcome}")
        self._screen.write(call.observation)
        self._screen.end()


def footer(trajectory: Trajectory, seconds: float) -> list[tuple[str, str]]:
    """Returns lines with the statistics of a trajectory, and with the protocol rules it broke.

    Args:
        trajectory: a finished trajectory.
        seconds: seconds that the trajectory took.

    Returns:
        Pairs (line, role). The line has the colour of the role.
    """
    count, calls = trajectory.num_policy_tokens, trajectory.tool_calls
    in_tools = sum(call.end - call.start for call in calls)
    tools = f"{len(calls)} tool call{'' if len(calls) == 1 else 's'}"
    tools += f" ({in_tools:.2f} s)" if calls else ""
    rate = count / max(seconds - in_tools, 1e-9)
    statistics = f"{count} tokens, {tools}, {seconds:.1f} s, {rate:.0f} tokens/s"
    lines = [("no answer", "fault")] if trajectory.answer is None else []
    lines.append((f"{statistics}, stop: {trajectory.stop_reason}", "question"))
    broken = Counter(f"{v.kind}: {v.message}" for v in trajectory_violations(trajectory))
    rules = [f"{text} ({n} times)" if n > 1 else text for text, n in broken.most_common()]
    if len(rules) > MAX_FAULTS:
        rules[MAX_FAULTS:] = [f"{len(rules) - MAX_FAULTS} more rules"]
    return [*lines, *((f"breaks the protocol: {rule}", "fault") for rule in rules)]
