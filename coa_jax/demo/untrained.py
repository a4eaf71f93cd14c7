"""Creates an untrained policy: a tokenizer trained on distilled text, and random parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from coa_jax.config.fields import Bounded, Positive, Seed, Share, Size, Times
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.demo.bpe import train_bpe
from coa_jax.demo.induction import add_induction
from coa_jax.engine.memory import format_bytes, free_memory
from coa_jax.errors import UserError
from coa_jax.model.api import Model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params, num_params
from coa_jax.protocol import Prompt, get_protocol
from coa_jax.run.settings import build_config
from coa_jax.tasks.prompts import load_prompt, make_card
from coa_jax.tools.concurrency import run_outside_event_loop
from coa_jax.train.renaming import template_words, texts_of


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
            `demo.induction`.
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
        path: directory to write.

    Raises:
        UserError: the free memory is too small for the parameters.
    """
    protocols = [get_protocol(name) for name in sorted({record.protocol for record in records})]
    roles = sorted({role for rules in protocols if not rules.format for role in rules.roles})
    tags = [tag for role in roles for tag in (f"<{role}>", f"</{role}>")]
    tags += [tag for rules in protocols if rules.format for tag in rules.format.tags]
    words, texts = template_words(records, prompt, config.common_word), texts_of(records, prompt)
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
            f"the policy's parameters need {format_bytes(needed)}, and {format_bytes(free)} are "
            "free; lower a size"
        )
    params = init_params(model, jax.random.key(config.seed))
    if config.induction:
        params = add_induction(params, model, config.seed)
    save_model(Model(model, params, tokenizer, make_card(prompt, records)), path, overwrite=True)


def create_policy(
    path: str | Path,
    records: Sequence[DistilledRecord],
    *,
    prompt_style: str = "brief",
    **sizes: Any,
) -> Path:
    """Creates a small untrained policy with random parameters and a tokenizer trained on records.

    Args:
        path: directory to which the policy is written, in Hugging Face format.
        records: trajectories on whose text the tokenizer is trained.
        prompt_style: style of the instructions in the prompts, as in the setting ``prompt_style``
            of SFT. The tokenizer is trained on the text of the prompts, too.
        sizes: fields of `ScratchConfig`, such as ``num_layers=2``.

    Returns:
        The directory; `train_sft` accepts it as the setting ``model``.

    Raises:
        UserError: a size is invalid, or the free memory is too small for the parameters.
    """
    config = build_config(ScratchConfig, sizes)
    run_outside_event_loop(
        lambda: write_policy(config, records, load_prompt(prompt_style), Path(path))
    )
    return Path(path)
