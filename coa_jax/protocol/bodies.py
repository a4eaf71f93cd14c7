"""Parsers and writers of segment bodies (paper §3.1, App C, App D).

Each parser is total: it returns the content, or None (an empty tuple for lists) if the body does
not have the required form. The time of every parser is linear in the length of the body.
"""

from __future__ import annotations

import json
import re

CRITERIA = ("information_conflict", "tool_effectiveness", "trajectory_monitoring")
"""The criteria that a reflection grades, in the order in which it is written."""

GRADES = ("good", "average", "poor")

_GRADE_NAMES = {"good": "good", "average": "average", "fair": "average", "poor": "poor"}
_PAIR_END = re.compile(r"[\n,;]")
_SCALE = re.compile(r"\b1\s*(?:-|\u2013|to)\s*4\b|\bout\s+of\s+4\b|/\s*4\b", re.IGNORECASE)
_BARE_SCORE = re.compile(r"\s*([0-9]+)\s*\.?\s*")
_NAMED_SCORE = re.compile(
    r"\b(?:score|grade|rating)[sd]?\b[^0-9\n]{0,80}([0-9]+(?:[.,][0-9]+)?)", re.IGNORECASE
)
_MARKDOWN_LINK = re.compile(r"\[[^\]\[]*\]\((\S+)\)")
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_CODE_FENCES = ("```py", "```python")
_STDIN_FENCES = ("```sh", "```bash")
_THOUGHT = re.compile(r"\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
_JSON_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


def without_thought(reply: str) -> str:
    """Removes the initial ``<think>`` block of a reasoning model.

    The result is empty if the block never ends. The content of the block is a draft, not a reply.
    """
    return _THOUGHT.sub("", reply, count=1) if reply.lstrip().startswith("<think>") else reply


def without_fence(text: str) -> str:
    """Returns the content of a JSON code fence around a whole text; any other text as it is."""
    fenced = _JSON_FENCE.fullmatch(text)
    return fenced[1] if fenced else text


def parse_reflection(body: str) -> dict[str, str] | None:
    """Parses the grades of a reflection into ``{criterion: "good" | "average" | "poor"}``.

    The body has one ``criterion: grade`` pair for each of ``CRITERIA``, in any order, separated by
    line ends, commas or semicolons. Case does not matter. ``fair`` is read as ``average``: the
    paper uses both names for the middle grade. The result is None if a pair is missing, repeated or
    unknown.
    """
    grades: dict[str, str] = {}
    for pair in _PAIR_END.split(body):
        if not pair.strip():
            continue
        name, colon, grade = pair.partition(":")
        key = re.sub(r"[\s-]+", "_", name.strip().lower())
        value = _GRADE_NAMES.get(grade.strip().rstrip(".").lower())
        if not colon or key not in CRITERIA or key in grades or value is None:
            return None
        grades[key] = value
    return {key: grades[key] for key in CRITERIA} if len(grades) == len(CRITERIA) else None


def format_reflection(grades: dict[str, str]) -> str:
    """Writes the body that ``parse_reflection`` reads, in the surface form of the paper."""
    names = {"good": "Good", "average": "Fair", "poor": "Poor"}
    return "\n".join(f"{key}: {names[grades[key]]}" for key in CRITERIA)


def parse_double_check(body: str) -> int | None:
    """Parses the score, from 1 to 4, of a double check.

    The body is either the number alone (``3``, ``3/4``) or a sentence in which the number follows
    the word score, grade or rating. The scale itself (``1-4``, ``out of 4``) is not read as a
    score. The result is None if there is no score, a number outside the scale, or two different
    scores.
    """
    body = _SCALE.sub(" ", body)
    bare = _BARE_SCORE.fullmatch(body)
    found = {bare[1]} if bare else set(_NAMED_SCORE.findall(body))
    if len(found) != 1:
        return None
    (score,) = found
    return int(score) if score in ("1", "2", "3", "4") else None


def format_double_check(score: int) -> str:
    """Writes the sentence that ``parse_double_check`` reads."""
    return f"The score of the suggested answer is {score}."


def parse_code(body: str) -> tuple[str, str | None] | None:
    """Parses a code call into its program and its standard input.

    The body is a block fenced by ```` ```py ```` or ```` ```python ````, then at most one block
    fenced by ```` ```sh ```` or ```` ```bash ````, whose text is the standard input. Only blanks
    may surround the blocks. A block ends at the first line that consists of the fence alone.

    Returns:
        (source without its last line end, standard input with its last line end or None), or None
        if the body does not have this form.
    """
    blocks = _fenced_blocks(body)
    if blocks is None or not 1 <= len(blocks) <= 2 or blocks[0][0] not in _CODE_FENCES:
        return None
    source = "\n".join(blocks[0][1])
    if not source.strip():
        return None
    if len(blocks) == 1:
        return source, None
    if blocks[1][0] not in _STDIN_FENCES:
        return None
    return source, "".join(line + "\n" for line in blocks[1][1])


def format_code(source: str, stdin: str | None = None) -> str:
    """Writes the body that ``parse_code`` reads."""
    body = f"```py\n{source}\n```"
    if stdin is None:
        return body
    return f"{body}\n```sh\n{stdin.removesuffix(chr(10))}\n```"


def _fenced_blocks(body: str) -> list[tuple[str, list[str]]] | None:
    """Returns (opening fence, lines) of each block; None for text outside or an open block."""
    blocks: list[tuple[str, list[str]]] = []
    lines: list[str] | None = None
    for line in body.split("\n"):
        mark = line.rstrip()
        if lines is None:
            mark = mark.lstrip()
            if mark.startswith("```") and len(mark) > 3:
                lines = []
                blocks.append((mark.lower(), lines))
            elif mark:
                return None
        elif mark == "```":
            lines = None
        else:
            lines.append(line.removesuffix("\r"))
    return blocks if lines is None else None


def split_answers(body: str) -> tuple[str, ...]:
    """Splits answers joined by ``|``, strips blanks, and drops blank answers."""
    return tuple(part.strip() for part in body.split("|") if part.strip())


def parse_boxed(body: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}`` with balanced braces.

    Escaped braces, ``\{`` and ``\}``, do not count.
    """
    start = body.rfind("\\boxed{")
    if start < 0:
        return None
    depth, position = 1, start + len("\\boxed{")
    for match in re.finditer(r"\\.|[{}]", body[position:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return body[position : position + match.start()].strip()
    return None


def parse_solution(body: str) -> str | None:
    r"""Parses the final answer of the code protocol: ``\boxed{...}``, or one fenced program."""
    boxed = parse_boxed(body)
    if boxed is not None:
        return boxed or None
    code = parse_code(body)
    return code[0] if code is not None and code[1] is None else None


def parse_urls(body: str) -> tuple[str, ...]:
    """Splits URLs joined by ``|``, plain or as Markdown links; drops parts that are not URLs."""
    parts = [part.strip() for part in body.split("|")]
    links = [_MARKDOWN_LINK.fullmatch(part) for part in parts]
    urls = [link[1] if link else part for link, part in zip(links, parts, strict=True)]
    return tuple(url for url in urls if _URL.fullmatch(url))


def parse_inspection(body: str) -> tuple[str, str | None] | None:
    """Parses a call of the visual inspector: a JSON object, fenced or bare.

    Returns:
        (file path, question or None), or None if the body does not have this form.
    """
    blocks = _fenced_blocks(body)
    if blocks and len(blocks) == 1 and blocks[0][0] == "```json":
        body = "\n".join(blocks[0][1])
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    path, question = value.get("file_path"), value.get("question")
    if not isinstance(path, str) or not path.strip() or not isinstance(question, str | None):
        return None
    return path, question
