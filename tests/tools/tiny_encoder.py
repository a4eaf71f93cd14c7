"""Small random encoders in the Hugging Face format, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

torch = pytest.importorskip("torch")

WORDS = ("the capital of Aland is Mariehamn", "Bland Dull area lake river", "a an 1 2 3 sq km")


MARKS = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    "xlm-roberta": ("<s>", "<pad>", "</s>", "<unk>"),
}
"""The first ids of a vocabulary."""


def write_tokenizer(path: Path, texts: Iterable[str], kind: str) -> None:
    """A WordPiece tokenizer with the marks of a kind of model."""
    marks = MARKS[kind]
    pad, unknown, first, last = marks if kind == "bert" else (marks[i] for i in (1, 3, 0, 2))
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=list(marks), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(mark, tokenizer.token_to_id(mark)) for mark in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=ends
    )
    # As published encoders have them: what ours does not want, it has to turn off.
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=7, pad_token=pad)
    tokenizer.save(str(path))


def write(folder: Path, kind: str = "bert", seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Writes an encoder and returns the model of transformers, ready to compute."""
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer.json", WORDS, kind)
    classes = {
        "bert": (transformers.BertConfig, transformers.BertModel),
        "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel),
    }
    make_config, make_model = classes[kind]
    values = {
        "vocab_size": 200,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
        "type_vocab_size": 2,
        "pad_token_id": 0 if kind == "bert" else 1,
        **changes,
    }
    torch.manual_seed(seed)
    model = make_model(make_config(**values)).eval()
    with torch.no_grad():  # also the biases and scales, which begin as zeros and ones
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def write_pooling(folder: Path, *modes: str) -> None:
    """The file in which sentence-transformers says how a vector is made."""
    (folder / "1_Pooling").mkdir()
    known = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens")
    values = {f"pooling_mode_{mode}": mode in modes for mode in known}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values))
