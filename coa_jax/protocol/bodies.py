"""Parses and writes the bodies of segments (Chain-of-Agents paper §3.1, App C, App D).

The body of a segment is the text between its opening tag and its closing tag. No parser raises an
error. If the body does not have the required form, the result is None, or an empty tuple if the
parser returns a list. The time of each parser is linear in the length of the body.
"""

from __future__ import annotations

import json
import re

CRITERIA = ("information_conflict", "tool_effectiveness", "trajectory_monitoring")
"""The criteria that a reflection grades, in the order in which `format_reflection` writes them."""

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
    """Removes the thought (``<think>...</think>``) at the beginning of a model's reply.

    If the thought has no closing tag, the result is "", because the text then ends within the
    thought.
    """
    return _THOUGHT.sub("", reply, count=1) if reply.lstrip().startswith("<think>") else reply


def without_fence(text: str) -> str:
    """Removes the Markdown fence around a text, if the whole text is one code block.

    The label of the code block must be empty or ``json``. Any other text is returned unchanged.
    """
    fenced = _JSON_FENCE.fullmatch(text)
    return fenced[1] if fenced else text


def parse_reflection(body: str) -> dict[str, str] | None:
    """Parses the grades of a reflection.

    The body must contain one ``criterion: grade`` pair for each criterion of ``CRITERIA``, in any
    order. Line ends, commas or semicolons separate the pairs. Case does not matter. The grade
    ``fair`` means ``average``, because the paper uses both names for the middle grade.

    Returns:
        Criterion -> ``good``, ``average`` or ``poor``; None if a criterion is missing, occurs
        twice, or is unknown, or if a grade is unknown.
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
    """Writes grades as the body of a reflection; `parse_reflection` is the inverse.

    The names of the grades are those of the Chain-of-Agents paper: Good, Fair and Poor.

    Args:
        grades: criterion -> ``good``, ``average`` or ``poor``.
    """
    names = {"good": "Good", "average": "Fair", "poor": "Poor"}
    return "\n".join(f"{key}: {names[grades[key]]}" for key in CRITERIA)


def parse_double_check(body: str) -> int | None:
    """Parses the score of a double check, an integer from 1 to 4.

    The body is either only the number (``3``, ``3/4``), or a sentence in which the number follows
    the word "score", "grade" or "rating". A mention of the scale (``1-4``, ``out of 4``) is not a
    score.

    Returns:
        The score; None if the body contains no score, a number outside the scale, or two different
        scores.
    """
    body = _SCALE.sub(" ", body)
    bare = _BARE_SCORE.fullmatch(body)
    scores = {bare[1]} if bare else set(_NAMED_SCORE.findall(body))
    if len(scores) != 1:
        return None
    (score,) = scores
    return int(score) if score in ("1", "2", "3", "4") else None


def format_double_check(score: int) -> str:
    """Writes a score from 1 to 4 as the body of a double check; inverse of `parse_double_check`."""
    return f"The score of the suggested answer is {score}."


def parse_code(body: str) -> tuple[str, str | None] | None:
    """Parses the body of a ``code`` call into the program and its standard input.

    The body consists of a Markdown code block with the label ``py`` or ``python``, and optionally a
    second block with the label ``sh`` or ``bash``, which contains the standard input. Outside the
    blocks, only spaces and line ends are allowed. A block ends at the first line that contains only
    the closing fence.

    Returns:
        (source of the program without its last line end, standard input with its last line end).
        The second value is None if there is no second block. The result is None if the body has
        another form.
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
    """Writes the body of a ``code`` call; `parse_code` is the inverse.

    Args:
        source: source of the program.
        stdin: standard input of the program; None for no standard input.
    """
    body = f"```py\n{source}\n```"
    if stdin is None:
        return body
    lines = f"{stdin.removesuffix(chr(10))}\n" if stdin else ""
    return f"{body}\n```sh\n{lines}```"


def _fenced_blocks(body: str) -> list[tuple[str, list[str]]] | None:
    """Returns (opening fence, lines) of each Markdown code block.

    The result is None if there is text outside the blocks, or if a block is not closed.
    """
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
    """Splits the body of an answer into several answers at ``|``; drops empty parts."""
    return tuple(part.strip() for part in body.split("|") if part.strip())


def parse_boxed(body: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}`` in a text.

    The content ends at the matching closing brace. Escaped braces, ``\{`` and ``\}``, are ignored.
    The result is None if there is no ``\boxed``, or if its closing brace is missing.
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
    r"""Parses the final answer in the protocol ``code``.

    The result is the content of ``\boxed{...}``, or the program if the answer is one Markdown code
    block. The result is None for any other answer.
    """
    boxed = parse_boxed(body)
    if boxed is not None:
        return boxed or None
    code = parse_code(body)
    return code[0] if code is not None and code[1] is None else None


def parse_urls(body: str) -> tuple[str, ...]:
    """Parses the body of a ``crawl_page`` call: a list of URLs, separated by ``|``.

    A part may be a URL, or a Markdown link with a URL. Other parts are dropped.
    """
    parts = [part.strip() for part in body.split("|")]
    links = [_MARKDOWN_LINK.fullmatch(part) for part in parts]
    urls = [link[1] if link else part for link, part in zip(links, parts, strict=True)]
    return tuple(url for url in urls if _URL.fullmatch(url))


def parse_inspection(body: str) -> tuple[str, str | None] | None:
    """Parses the body of a ``visual_inspector`` call.

    The body is a JSON object with the key ``file_path`` and optionally ``question``. It may stand
    in a Markdown code block with the label ``json``.

    Returns:
        (file path, question). The question is None if the object has none. The result is None if
        the body has another form.
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
