"""Creates an untrained policy: a tokenizer trained on distilled text, and random parameters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from coa_jax.bounds import Bounded, Positive, Seed, Share, Size, Times
from coa_jax.engine.memory import free_memory, size
from coa_jax.errors import UserError
from coa_jax.model.api import Model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params, num_params
from coa_jax.protocol import Prompt, get_protocol, messages_of
from coa_jax.small.bpe import train_bpe
from coa_jax.small.induction import add_induction
from coa_jax.tasks.prompts import make_card
from coa_jax.trajectory import DistilledRecord


@dataclasses.dataclass(frozen=True)
class ScratchConfig(Bounded):
    """Sizes of a policy that is trained from scratch.

    Attributes:
        architecture: family of the model.
        vocab_size: maximum number of tokens of the tokenizer.
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes of the
            model, see `ModelConfig`.
        rope_theta: base of the rotary frequencies.
        induction: whether the first two layers start with an induction circuit, see
            `small.induction`.
        common_word: a capitalised word becomes a token of its own if at least this share of the
            records contains it. Rarer capitalised words count as names. The tokenizer splits names
            into pieces, so that copying generalises to unseen names.
        seed: seed of the random parameters.
    """

    architecture: Literal["llama", "qwen3"] = "llama"
    vocab_size: Size = 768
    hidden_size: Size = 256
    intermediate_size: Size = 768
    num_layers: Times = 4
    num_heads: Times = 4
    num_kv_heads: Times = 2
    head_dim: Times = 64
    rope_theta: Positive = 1e6
    induction: bool = True
    common_word: Share = 0.1
    seed: Seed = 0


def write_policy(
    config: ScratchConfig, records: Sequence[DistilledRecord], prompt: Prompt, path: Path
) -> None:
    """Creates an untrained policy and writes it as a Hugging Face directory.

    Args:
        config: sizes of the policy.
        records: records on whose text the tokenizer is trained.
        prompt: prompt style in which the policy sees the questions of the records.
        path: path of the directory.

    Raises:
        UserError: the free memory is too small for the parameters.
    """
    protocols = [get_protocol(name) for name in sorted({record.protocol for record in records})]
    roles = sorted({role for known in protocols if not known.format for role in known.roles})
    tags = [tag for role in roles for tag in (f"<{role}>", f"</{role}>")]
    tags += [tag for known in protocols if known.format for tag in known.format.tags]
    words, texts = template_words(records, prompt, config.common_word), _texts(records, prompt)
    tokenizer = train_bpe(texts, config.vocab_size, tags=tags, not_names=words)
    model = ModelConfig(
        architecture=config.architecture,
        qk_norm=config.architecture == "qwen3",
        rope_theta=config.rope_theta,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    needed, free = 4 * num_params(model), free_memory(jax.local_devices()[0])
    if free is not None and needed > free:
        raise UserError(
            f"the policy's parameters need {size(needed)}, and {size(free)} are free; lower a size"
        )
    params = init_params(model, jax.random.key(config.seed))
    if config.induction:
        params = add_induction(params, model, config.seed)
    save_model(Model(model, params, tokenizer, make_card(prompt, records)), path, overwrite=True)


def _texts(records: Sequence[DistilledRecord], prompt: Prompt) -> list[str]:
    return [
        "\n".join((*(text for _, text in messages_of(record, prompt).turns), record.text))
        for record in records
    ]


def template_words(
    records: Sequence[DistilledRecord], prompt: Prompt, share: float = 0.1
) -> list[str]:
    """Returns the capitalised words, such as "Step", that occur in many records, sorted.

    These words belong to the templates of questions and trajectories, and are not names.

    Args:
        records: the records.
        prompt: prompt style of the questions.
        share: a word is returned if at least this share of the records contains it.
    """
    texts = _texts(records, prompt)
    counts: Counter[str] = Counter()
    for text in texts:
        words = {w.strip(".,:?()<>/`'\"") for line in text.split("\n") for w in line.split(" ")}
        counts.update(word for word in words if word.isalpha() and word != word.lower())
    return sorted(word for word, count in counts.items() if count >= share * len(texts))
