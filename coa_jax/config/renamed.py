"""Maps former keys of settings to their present keys, or to advice if there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RENAMED = {
    "optimizer.b1": "optimizer.options.b1",
    "optimizer.b2": "optimizer.options.b2",
    "optimizer.eps": "optimizer.options.eps",
    "tools.code_libraries": "tools.code.libraries",
    "tools.code_memory_mb": "tools.code.memory_mb",
    "tools.code_session": "tools.code.session",
    "tools.code_timeout_s": "tools.code.timeout_s",
    "tools.code_unsafe": "tools.unsafe",
    "tools.code_url": "tools.code.url",
    "tools.corpus": "tools.wiki_search.corpus",
    "tools.encoder": "tools.wiki_search.encoder",
    "tools.retrieval": "tools.wiki_search.retrieval",
    "tools.top_k": "tools.wiki_search.top_k",
    "tools.wiki_url": "tools.wiki_search.url",
}
"""Former key -> present key. A key may stand inside a group, as in ``rl.optimizer.b1``."""

DEFAULTS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
"""Former defaults of settings that are options now; options are given only where they differ."""

_AS_IN_TRAINING = "evaluations during training have the limits of the group rollout"
REMOVED = {
    "optimizer.max_skipped": "training ends after 5 skipped updates in a row",
    "pool.rest_most": "each rest has rest_steps steps",
    "pool.memory": "the solve rate counts the newest group",
    "pool.solved_at": "a trajectory solves its task with a reward of at least 1",
    "pool.curriculum_start": "a curriculum starts at difficulty 0",
    "held_out.seed": "the seed of evaluations during training is 0",
    "held_out.top_p": "evaluations during training sample from all tokens",
    "held_out.top_k": "evaluations during training sample from all tokens",
    "held_out.max_tokens": _AS_IN_TRAINING,
    "held_out.max_turn_tokens": _AS_IN_TRAINING,
    "held_out.max_tool_calls": _AS_IN_TRAINING,
    "held_out.slots": "evaluations during training use engine.slots",
    "graders.programs": "half as many programs are graded at a time as there are processors",
    "graders.maths_s": "a comparison may take 10 seconds",
    "judge.attempts": "an answer is sent to the judge up to 3 times",
    "judge.answer_chars": "an answer of more than 2000 characters is wrong",
    "tools.passage_chars": "passages of the Factbook have up to 300 characters",
    "tools.code_cpu_s": "a process may use five sevenths of tools.code.timeout_s",
    "tools.code_output_chars": "the policy reads up to 1536 characters of output",
    "web_search.attempts": "a query is sent up to 3 times",
    "crawl_page.max_pages": "a call opens up to 5 pages",
    "crawl_page.page_timeout_s": "fetching a page may take 30 seconds",
    "crawl_page.max_bytes": "a page may have 8 MiB",
    "crawl_page.attempts": "a page is fetched up to twice",
    "crawl_page.concurrency": "a process reads up to 16 pages at a time",
    "visual_inspector.max_bytes": "an image may have 10 MiB",
    "visual_inspector.max_chars": "an observation has up to 6000 characters",
    "backoff_s": "the second attempt follows after at most 1 second",
    "json_mode": "write request={'response_format': {'type': 'json_object'}}",
    "max_tokens_name": "write request={'max_tokens': None, 'max_completion_tokens': N}",
}
"""Former key without a successor -> what holds now, or what to write."""


def hint(key: str) -> str:
    """Returns what to write in place of a former key, for an error message; "" if unknown.

    Args:
        key: dotted key that does not exist, such as ``config.rl.optimizer.b2``.
    """
    for old, new in RENAMED.items():
        if before := _prefix_of(key, old):
            return f"; write {before}{new}"
    texts = (text for old, text in REMOVED.items() if _prefix_of(key, old))
    return next((f" any more: {text}" for text in texts), "")


def _prefix_of(key: str, old: str) -> str:
    """Returns the part of a key before the key ``old``, with the dot; "" if it does not end so."""
    return key.removesuffix(old) if key.endswith(f".{old}") else ""


def with_present_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run, with present keys in place of those of earlier versions."""
    result: dict[str, Any] = {}
    for key, value in _moved(config, ""):
        *groups, name = key.split(".")
        inner = result
        for group in groups:
            inner = inner.setdefault(group, {})
        # Options may have received a former setting before.
        is_group = isinstance(value, Mapping)
        inner[name] = {**value, **inner.get(name, {})} if is_group else value
    return result


def _moved(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields present keys and values for the settings of a config of any version."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        places = ((_prefix_of(f".{key}", old), new) for old, new in RENAMED.items())
        new = next((f"{before}{new}"[1:] for before, new in places if before), "")
        if any(_prefix_of(f".{key}", old) for old in REMOVED) or (
            new and DEFAULTS.get(name) == value
        ):
            continue
        is_group = isinstance(value, Mapping) and value and not name.endswith("options")
        if new or not is_group:  # the keys of options are those of a user's function
            yield new or key, value
        else:
            yield from _moved(value, f"{key}.")
