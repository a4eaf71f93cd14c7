"""Records a command in a terminal, and draws the recording as an SVG.

    python docs/figures/terminal.py ask.cast coa-jax ask "QUESTION" --model=DIR    # records
    python docs/figures/draw.py                                                    # draws

A recording is an asciicast (version 2).  In the drawing, each line is faint until the command wrote
the line, in slow motion.  Readers who prefer no motion see all lines at once.
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS = 80
SLOWER = 12
"""Seconds of the drawing for a second of the recording."""
STYLE = """
.paper { fill: #fcfcfa } text { fill: #1d2b2f; white-space: pre }
.command { font-weight: 600 }
.late { animation: appear 0.2s both }
@keyframes appear { from { opacity: 0.45 } }
@media (prefers-color-scheme: dark) { .paper { fill: #14201f } text { fill: #e2eceb } }
@media (prefers-reduced-motion: reduce) { .late { animation: none } }
"""


def record(file: Path, command: Sequence[str]) -> None:
    """Runs a command in a pseudo-terminal of 80 columns and writes what it shows."""
    os.environ |= {"COLUMNS": str(COLUMNS), "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start, events = time.monotonic(), []

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 4096)
        events.append([round(time.monotonic() - start, 3), "o", decoder.decode(data)])
        return data

    if pty.spawn(list(command), read):
        sys.exit(f"{shlex.join(command)} failed")
    head = {"version": 2, "width": COLUMNS, "height": 40}
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *events)), encoding="utf-8")


def lines_of(cast: Path) -> Iterator[tuple[float, str]]:
    """Yields (seconds since the first output, line with its escape sequences)."""
    _, *events = map(json.loads, cast.read_text(encoding="utf-8").splitlines())
    line = ""
    for seconds, _, data in events:
        *ended, rest = data.replace("\r", "").split("\n")
        for part in ended:
            yield seconds - events[0][0], line + part
            line = ""
        line += rest


def draw(cast: Path, shown: str) -> str:
    """An SVG document of a recording, below the line ``$ shown``."""
    console, width, height = Console(), 7.8, 18
    rows = [(None, Text(f"$ {shown}"))]
    rows += [(seconds, Text.from_ansi(line)) for seconds, line in lines_of(cast)]
    parts = []
    for row, (seconds, text) in enumerate(rows):
        y, column, marks, spans = 28 + height * row, 0, "", ""
        for segment in text.render(console):
            style, x = segment.style or Style(), f'x="{16 + width * column:.1f}"'
            fill = f' fill="{style.color.get_truecolor().hex}"' if style.color else ""
            bold = ' font-weight="600"' if style.bold else ""
            length = f"{width * len(segment.text):.1f}"
            if style.bgcolor:
                ground = f'height="{height}" fill="{style.bgcolor.get_truecolor().hex}"'
                marks += f'<rect {x} y="{y - 14}" width="{length}" {ground}/>'
            spans += f'<tspan {x} textLength="{length}"{fill}{bold}>{escape(segment.text)}</tspan>'
            column += len(segment.text)
        kind = "command" if seconds is None else "late"
        delay = "" if seconds is None else f' style="animation-delay:{1 + SLOWER * seconds:.2f}s"'
        parts.append(f'<g class="{kind}"{delay}>{marks}<text y="{y}">{spans}</text></g>')
    size = (32 + width * max(text.cell_len for _, text in rows), 28 + height * len(rows))
    body = "\n".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" \
role="img" aria-label={quoteattr(shown)} font-size="13" \
font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">
<style>{STYLE}</style>
<rect class="paper" width="{size[0]:.0f}" height="{size[1]}" rx="10"/>
{body}
</svg>
"""


if __name__ == "__main__":
    record(Path(__file__).with_name(sys.argv[1]), sys.argv[2:])
