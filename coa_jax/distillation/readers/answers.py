r"""Finds the answer that a model marked by ``<answer>``, "Final answer:" or in other ways."""

from __future__ import annotations

import json
import re

from coa_jax.protocol import parse_boxed
from coa_jax.protocol.bodies import without_fence

_TAGS = [re.compile(rf"<(/?){name}>", re.IGNORECASE) for name in ("answer", "final_answer")]
_MARKED = re.compile(
    r"(?:^|(?<=[.!?;:)\]\"'*\u3002\uff01\uff1f])[ \t]+)(?P<before>[^\w\n]*)"
    r"(?:(?:so|thus|hence|therefore),?[ ]+)?(?:(?:the|my|our)[ ]+)?"
    r"final[ ]answer(?:[ ]is)?(?P<within>[^\w\n:\uff1a]*)(?:[:\uff1a]|$)",
    re.IGNORECASE | re.MULTILINE,
)
_SAID = re.compile(
    r"(?:^(?P<before>[^\w\n]*)|\b(?:the|my|our)[ ]+)"
    r"(?:final[ ])?answer(?:(?:[ ]is)?(?P<within>[^\w\n:\uff1a]*)[:\uff1a]|[ ]is[ ])",
    re.IGNORECASE | re.MULTILINE,
)
_COPULA = re.compile(r"\s(?:is|was|are|were)\s", re.IGNORECASE)
_DOUBT = re.compile(
    r"n['\u2019]t\b|\b(?:no|not|none|nor|never|neither|cannot|without|except|unless|if|whether)\b"
    r"|\b(?:maybe|perhaps|possibly|wrong|incorrect|false|thought|guess\w*|assum\w*|believ\w*)\b",
    re.IGNORECASE,
)
"""Matches words with which a text may deny or doubt the answer that it contains."""

_TURN = re.compile(
    r"\b(?:but|however|although|though|instead|rather|actually|yet|answer\w*|conclu\w*)\b",
    re.IGNORECASE,
)
"""Matches words with which one of several sentences may announce another result."""

_SENTENCE_END = re.compile(r"(?<=[.!])[\"')\]*]*\s+|\s*\n\s*")
_LONG_WORD = re.compile(r"\w{4,}")
_FURTHER = re.compile(r"[.!?][\"')\]*]*\s+\S")
_KEYS = ("final_answer", "answer")
_EMPHASIS = re.compile(r"[*]+\Z")
_FENCED = re.compile(r"```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_BLOCK_END = re.compile(r"\n[ \t]*(?:\n|\Z)")
_PAIRS = (
    *(("```", "```"), ("**", "**"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'")),
    *(("\u201c", "\u201d"), ("\u2018", "\u2019")),
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
)
"""Marks that may surround an answer without belonging to it.

Brackets are not among them, because they may belong to a list or an interval.
"""

_BOX = "\\boxed{"


def marked_answer(words: str) -> tuple[str, str] | None:
    r"""Returns (text before the answer, answer) if a text marks an answer; otherwise None.

    If several answers are marked, the result is the last one with the most reliable kind of mark.
    The kinds of marks are, the most reliable first:

    - the whole text is a JSON object with the field ``final_answer`` or ``answer``;
    - the tag ``<answer>``, or else ``<final_answer>``;
    - "Final answer" at the beginning of a line or of a sentence, with a colon or at the end of its
      line. The answer is the rest of this line, or the next block of text if the line ends there;
    - a box (``\boxed``);
    - "Answer:" at the beginning of a line, or "the answer is", also with the word "final". The
      answer is the rest of this line, if it is a single sentence.

    If a marked answer contains exactly one box, the content of the box is the answer. For example,
    "Final answer: $\boxed{7}$" gives "7".

    Args:
        words: last text of the model.

    Returns:
        The text before the answer, and the answer; None if no answer is marked. Text after the
        answer is left out. If only a box marks the answer, the box is usually part of a sentence.
        The first text is then the whole text, with the box replaced by its content; or "" if there
        is no word besides the box.
    """
    if (stored := _answer_in_json(words)) is not None:
        return "", _unboxed(stored)
    tagged = next(filter(None, (_tagged(words, tag) for tag in _TAGS)), None)
    if tagged:
        opening, closing = tagged
        inside = words[opening.end() : closing.start()]
        return words[: opening.start()].strip(), _unboxed(inside)
    for mark in reversed(list(_MARKED.finditer(words))):
        answer = _unboxed(_text_after(words, mark))
        if answer:
            return words[: mark.start()].strip(), answer
    boxed = parse_boxed(words)
    if not boxed:
        return _answer_in_sentence(words)
    start = words.rindex(_BOX)
    end = words.index(boxed, start + len(_BOX)) + len(boxed)
    end = words.index("}", end) + 1
    around = words[:start] + words[end:]
    sentence = words[:start] + boxed + words[end:] if re.search(r"\w", around) else ""
    return sentence.strip(), _without_marks(boxed)


def stated_answer(words: str, question: str) -> str | None:
    """Returns what a text states in the form "SUBJECT is ANSWER."; otherwise None.

    The verb is "is", "was", "are" or "were", and occurs once in the sentence. In a text of several
    sentences, exactly one sentence of this form must have a word of the question, with at least
    four letters, in its subject. Such an answer is less reliable than a marked one, so the result
    is also None if any sentence asks, denies or doubts something, or if one of several sentences
    announces another result.

    Args:
        words: last text of the model.
        question: the question of the run.
    """
    if "?" in words or _DOUBT.search(words):
        return None
    sentences = list(filter(None, _SENTENCE_END.split(words.strip())))
    pairs = [_COPULA.split(sentence) for sentence in sentences]
    if len(sentences) > 1:
        asked = set(_LONG_WORD.findall(question.lower()))
        pairs = [pair for pair in pairs if asked & {*_LONG_WORD.findall(pair[0].lower())}]
        pairs = [pair for pair in pairs if len(pair) > 1]
        if _TURN.search(words):
            return None
    if len(pairs) != 1 or len(pairs[0]) != 2 or not pairs[0][0]:
        return None
    return _unboxed(pairs[0][1].removesuffix(".").replace("**", "")) or None


def _answer_in_json(words: str) -> str | None:
    """Returns the answer in a text that is a JSON object; None for any other text."""
    text = without_fence(words.strip())
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    values = (value.get(key) for key in _KEYS)
    return next((str(v).strip() for v in values if isinstance(v, str | int | float)), None)


def _answer_in_sentence(words: str) -> tuple[str, str] | None:
    """Returns the last answer after the words "Answer:" or "the answer is"."""
    for mark in reversed(list(_SAID.finditer(words))):
        line = _text_after(words, mark).partition("\n")[0].strip()
        if re.search(r"\w", line) and not _FURTHER.search(line):
            return words[: mark.start()].strip(), _unboxed(line.removesuffix("."))
    return None


def _tagged(words: str, pattern: re.Pattern[str]) -> tuple[re.Match[str], re.Match[str]] | None:
    """Returns the last pair of tags, in linear time even if many tags are not closed."""
    pair: tuple[re.Match[str], re.Match[str]] | None = None
    opening: re.Match[str] | None = None
    for tag in pattern.finditer(words):
        if not tag[1]:
            opening = opening or tag
        elif opening is not None:
            pair, opening = (opening, tag), None
    return pair


def _text_after(words: str, mark: re.Match[str]) -> str:
    """Returns the rest of the line after a mark, or the next block if the line ends there.

    A fenced program counts as one block.
    """
    line, _, below = words[mark.end() :].partition("\n")
    emphasis = _EMPHASIS.search(mark["before"] or "")
    if emphasis and emphasis[0] not in (
        mark["within"] or ""
    ):  # the emphasis was opened before the mark
        if line.startswith(emphasis[0]):
            line = line.removeprefix(emphasis[0])
        elif line.rstrip().endswith(emphasis[0]):
            line = line.rstrip().removesuffix(emphasis[0])
    rest = f"{line}\n{below}".lstrip()
    fenced = _FENCED.match(rest)
    if fenced and "\n" in fenced[0]:
        return fenced[0]
    return line if line.strip() else _BLOCK_END.split(rest, maxsplit=1)[0]


def _unboxed(answer: str) -> str:
    """Removes the marks around an answer, and its box if it contains exactly one."""
    answer = _without_marks(answer)
    if answer.count(_BOX) == 1 and not answer.startswith("```"):
        return _without_marks(parse_boxed(answer) or answer)
    return answer


def _without_marks(answer: str) -> str:
    answer = answer.strip()
    for opening, closing in _PAIRS:
        if not (answer.startswith(opening) and answer.endswith(closing)):
            continue
        inner = answer[len(opening) : -len(closing)]
        program = opening == "```" and "\n" in inner
        if inner.strip() and not (program or opening in inner or closing in inner):
            return _without_marks(inner)
    return answer
