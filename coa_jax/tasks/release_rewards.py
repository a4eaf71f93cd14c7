"""Reproduces the rewards of the authors' release, with the same names and results.

With these rewards, results can be compared with the figures of the release, whose code is in
``verl/utils/reward_score``. Most of the functions read the whole text of an episode, including
tags. The default reward is `coa_jax.tasks.grade_answer`, which corrects the bugs of these rewards;
``docs/grading.md`` lists the differences.
"""

from __future__ import annotations

import bisect
import itertools
import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPENED, _CLOSED = re.compile(r"<(\w+)>"), re.compile(r"</(\w+)>")
_TAG = re.compile(r"<(/?)(\w+)>")
_CODE_TAGS = ("think", "plan", "code", "observation", "reflection", "answer")
_WEB_TAGS = frozenset(
    {"think", "plan", "web_search", "crawl_page", "wiki_search", "observation", "reflection"}
    | {"suggested_answer", "double_check", "answer"}
)
_CODE_BODY = re.compile(
    r"\s*```py\n(?:(?!```).)*\n```\s*(?:```sh\n(?:(?!```).)*\n```\s*)?", re.DOTALL
)


def normalize_answer(text: str) -> str:
    """Normalises an answer for comparison, as the code of the Chain-of-Agents authors does.

    The result is in lower case, without ASCII punctuation, articles and double spaces. Accents are
    kept.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _golds(gold: Sequence[str] | str) -> list[str]:
    return [normalize_answer(text) for text in ([gold] if isinstance(gold, str) else gold)]


def _last_answer(text: str) -> str | None:
    pairs = _pairs(text, "answer")
    return pairs[-1][1] if pairs else None


def _pairs(text: str, only: str = "") -> list[tuple[str, str]]:
    r"""Returns (name, body) of each pair of an opening tag and its next closing tag.

    The result equals the matches of the pattern ``<(\w+)>(.*?)</\1>``. The pattern itself would
    search the rest of the text for each unclosed tag, which takes quadratic time.

    Args:
        text: text of an episode.
        only: name of the tags to return; "" for all tags.
    """
    closings: dict[str, list[int]] = {}
    for match in _CLOSED.finditer(text):
        closings.setdefault(match[1], []).append(match.start())
    pairs, end = [], 0
    for match in _OPENED.finditer(text):
        name = match[1]
        if match.start() < end or (only and name != only):
            continue
        starts = closings.get(name, [])
        at = bisect.bisect_left(starts, match.end())
        if at < len(starts):
            pairs.append((name, text[match.end() : starts[at]]))
            end = starts[at] + len(f"</{name}>")
    return pairs


def _predictions(text: str) -> list[str]:
    answer = _last_answer(text)
    return [part for part in answer.split("|") if part] if answer is not None else []


def mhqa_train(text: str, gold: Sequence[str] | str) -> float:
    """Returns 1.0 if each part of the last answer is an accepted answer, else 0.0.

    The character "|" separates the parts. The Chain-of-Agents authors train their multi-hop QA
    agent with this reward.

    Args:
        text: text of the episode.
        gold: accepted answers.
    """
    parts, golds = _predictions(text), _golds(gold)
    return float(bool(parts) and all(normalize_answer(part) in golds for part in parts))


def mhqa_eval(text: str, gold: Sequence[str] | str) -> float:
    """Returns 1.0 if the first part of the last answer is an accepted answer, else 0.0.

    The character "|" separates the parts. The Chain-of-Agents authors evaluate their multi-hop QA
    agent with this reward.

    Args:
        text: text of the episode.
        gold: accepted answers.
    """
    parts = _predictions(text)
    return float(bool(parts) and normalize_answer(parts[0]) in _golds(gold))


def qa_em(text: str, gold: Sequence[str] | str) -> float:
    """Returns 1.0 if the last answer as a whole is an accepted answer, else 0.0.

    Args:
        text: text of the episode.
        gold: accepted answers.
    """
    answer = _last_answer(text)
    return float(answer is not None and normalize_answer(answer.strip()) in _golds(gold))


def qa_subem(text: str, gold: Sequence[str] | str) -> float:
    """Returns 1.0 if an accepted answer is a substring of the last answer, else 0.0.

    Args:
        text: text of the episode.
        gold: accepted answers.
    """
    answer = _last_answer(text)
    if answer is None:
        return 0.0
    return float(any(item in normalize_answer(answer) for item in _golds(gold)))


def f1(answer: str, gold: Sequence[str] | str) -> float:
    """Returns the F1 score of the words of an answer, as SQuAD defines the score.

    Args:
        answer: answer of the policy.
        gold: accepted answers. The highest score over these answers is returned.
    """
    answer_words = Counter(normalize_answer(answer).split())
    best = 0.0
    for text in _golds(gold):
        gold_words = Counter(text.split())
        same = sum((answer_words & gold_words).values())
        if same:
            best = max(best, 2 * same / (answer_words.total() + gold_words.total()))
    return best


# --- format --------------------------------------------------------------------------------


def verify_format_simple(text: str) -> bool:
    """Returns whether a text passes the simple format check of the Chain-of-Agents authors.

    The opening tags and the closing tags must have the same names in the same order, and the last
    tag must be ``answer``. Tags inside observations are included, so the HTML of a page can violate
    the format.
    """
    opened, closed = _OPENED.findall(text), _CLOSED.findall(text)
    return bool(opened) and opened == closed and opened[-1] == "answer"


def verify_format_repetition(text: str) -> bool:
    """Returns whether no two tags have the same body, a check of the Chain-of-Agents authors.

    The tags ``answer`` and ``suggested_answer`` are ignored. Tags with different names are compared
    too.
    """
    bodies = [body for name, body in _pairs(text) if name not in ("answer", "suggested_answer")]
    return len(set(bodies)) == len(bodies)


def validate_format(text: str) -> bool:
    """Returns whether a text obeys the format of the Chain-of-Agents authors' web agent.

    * All tags are known, closed and not nested.
    * No body is empty.
    * No tag directly follows a tag with the same name.
    * There is exactly one ``answer``, at the end.
    """
    names: list[str] = []
    open_tag, start = "", 0
    for match in _TAG.finditer(text):
        closing, name = match[1] == "/", match[2]
        if name not in _WEB_TAGS:
            return False
        if not closing:
            if open_tag or (names and names[-1] == name):
                return False
            open_tag, start = name, match.end()
        elif name != open_tag or not text[start : match.start()].strip():
            return False
        else:
            names.append(name)
            open_tag = ""
    return not open_tag and names.count("answer") == 1 and names[-1] == "answer"


def check_code_format_correctness(text: str) -> bool:
    """Returns whether a text obeys the format of the Chain-of-Agents authors' code agent.

    * Each tag of the agent is opened as often as closed.
    * There is at least one ``code`` tag.
    * Each ``code`` tag contains a Markdown block with the label ``py``, and optionally a block with
      the label ``sh`` after it. The label ``python`` is not accepted.
    """
    if any(text.count(f"<{tag}>") != text.count(f"</{tag}>") for tag in _CODE_TAGS):
        return False
    bodies = [body for _, body in _pairs(text, "code")]
    return bool(bodies) and all(_CODE_BODY.fullmatch(body) for body in bodies)


def calculate_reward(text: str) -> float:
    """Returns the format score of the Chain-of-Agents authors' code agent, between 0 and 1.

    Each of these conditions adds 0.25:

    * The tags ``think``, ``plan``, ``code``, ``observation``, ``reflection`` and ``answer`` occur.
    * Each pair of successive tags is one of ``plan think``, ``think code``, ``think answer``,
      ``code observation``, ``observation reflection`` and ``reflection think``. The first tag is
      not checked.
    * Each tag is opened as often as closed.
    * No body is empty or contains a tag of the agent.
    """
    pairs = [pair for pair in _pairs(text) if pair[0] in _CODE_TAGS]
    names, bodies = [name for name, _ in pairs], [body for _, body in pairs]
    following = {
        "plan": ("think",),
        "think": ("code", "answer"),
        "code": ("observation",),
        "observation": ("reflection",),
        "reflection": ("think",),
    }
    steps = itertools.pairwise(names[1:])
    order = bool(names) and all(after in following.get(before, ()) for before, after in steps)
    paired = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in _CODE_TAGS)
    inner = re.compile("|".join(f"</?{tag}>" for tag in _CODE_TAGS))
    content = bool(bodies) and all(body.strip() and not inner.search(body) for body in bodies)
    return 0.25 * (set(_CODE_TAGS) <= set(names)) + 0.25 * order + 0.25 * paired + 0.25 * content
