"""The encoder equals that of transformers for any batch, and reports errors clearly."""

from __future__ import annotations

import concurrent.futures
import json
import shutil

import numpy as np
import pytest
import tokenizers

from coa_jax.errors import UserError
from coa_jax.tools.dense import EncoderConfig
from coa_jax.tools.encoder import TextEncoder
from tests.tools import tiny_encoder
from tests.tools.tiny_encoder import torch

TEXTS = [
    "the capital of Aland",
    "lake",
    "",
    "the area of Bland is 1 2 3 sq km " * 3,
    "a river of Dull is the lake of Mariehamn",
    "river " * 60,  # longer than there are positions
]


def expected(folder, model, texts, longest, pooling="mean"):
    """Unit vectors by transformers, one text at a time: no padding, no mask."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    rows = []
    for text in texts:
        tokens = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            hidden = model(tokens).last_hidden_state[0].double().numpy()
        pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
        rows.append(pooled / np.linalg.norm(pooled))
    return np.array(rows)


@pytest.mark.parametrize(
    ("kind", "changes", "longest"),
    [
        pytest.param("bert", {}, 40, marks=pytest.mark.slow),
        pytest.param("bert", {"hidden_act": "gelu_new"}, 40, marks=pytest.mark.slow),
        ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}, 40),
        ("xlm-roberta", {}, 38),  # its positions begin at 2
    ],
)
def test_vectors_are_those_of_transformers(tmp_path, kind, changes, longest):
    model = tiny_encoder.write(tmp_path / "m", kind, **changes)
    encoder = TextEncoder(EncoderConfig(str(tmp_path / "m"), batch_size=4))
    for name in ("query", "passage"):
        texts = [f"{name}: {text}" for text in TEXTS]
        wanted = expected(tmp_path / "m", model, texts, longest)
        found = encoder.queries(TEXTS) if name == "query" else encoder.passages(TEXTS)
        assert found.dtype == np.float32 and found.shape == (len(TEXTS), encoder.width)
        np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.slow
def test_the_first_state_is_taken_and_texts_are_cut_where_the_model_says_so(tmp_path):
    folder = tmp_path / "m"
    model = tiny_encoder.write(folder)
    tiny_encoder.write_pooling(folder, "cls_token")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    found = TextEncoder(EncoderConfig(str(folder), query_prefix="")).queries(TEXTS)
    np.testing.assert_allclose(found, expected(folder, model, TEXTS, 20, "cls"), atol=3e-6)
    shorter = TextEncoder(EncoderConfig(str(folder), query_prefix="", max_tokens=9)).queries(TEXTS)
    np.testing.assert_allclose(shorter, expected(folder, model, TEXTS, 9, "cls"), atol=3e-6)


def test_many_threads_and_any_batch_give_one_text_one_vector(tmp_path):
    tiny_encoder.write(tmp_path / "m")
    encoder = TextEncoder(EncoderConfig(str(tmp_path / "m")))
    alone = np.concatenate([encoder.queries([text]) for text in TEXTS])
    np.testing.assert_allclose(encoder.queries(TEXTS[::-1])[::-1], alone, atol=1e-6)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda text: encoder.queries([text])[0], TEXTS * 8))
    np.testing.assert_array_equal(many, np.tile(alone, (8, 1)))


def test_the_fingerprint_names_the_model_and_what_shapes_its_vectors(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        tiny_encoder.write(tmp_path / name, seed=seed)
    shutil.copytree(tmp_path / "a", tmp_path / "same")

    def name(folder, **changes):
        return TextEncoder(EncoderConfig(str(tmp_path / folder), **changes)).fingerprint

    assert name("a") == name("same") == name("a", batch_size=2)
    others = [name("b"), name("a", query_prefix=""), name("a", passage_prefix=""),
              name("a", max_tokens=9)]  # fmt: skip
    tiny_encoder.write_pooling(tmp_path / "same", "cls_token")
    assert len({name("a"), *others, name("same")}) == 6


def test_weights_with_a_prefix_and_in_parts_are_read(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "m"
    model = tiny_encoder.write(folder)
    tensors = {f"bert.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for part, chosen in (("one.safetensors", names[::2]), ("two.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / part)
        index.update(dict.fromkeys(chosen, part))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = TextEncoder(EncoderConfig(str(folder), query_prefix="")).queries(TEXTS[:1])
    np.testing.assert_allclose(found, expected(folder, model, TEXTS[:1], 40), atol=3e-6)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("config.json", r"config\.json: not JSON"),
        ("tokenizer.json", r"tokenizer\.json cannot be read.*save_pretrained"),
        ("model.safetensors", r"model\.safetensors is truncated or not a safetensors file"),
        ({"model_type": "mpnet"}, "model_type is 'mpnet'; give one of bert, roberta, xlm-roberta"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; give one of gelu"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key'; give one of absolute",
        ),
        ({"vocab_size": "left out"}, r"config\.json: the field 'vocab_size' is missing"),
        ({"hidden_size": 16}, r"has shape \[200, 32\], config.json asks for \[200, 16\]"),
        ({"num_hidden_layers": 4}, r"tensor encoder\.layer\.3\.attention\..* is missing"),
        ("pooling", "the pooling must be either mean or cls"),
        ("device", "device is 'abacus'; give one of"),
    ],
)
def test_what_is_wrong_with_a_directory_is_said(tmp_path, fault, said):
    folder, device = tmp_path / "m", "cpu"
    tiny_encoder.write(folder)
    if fault == "pooling":
        tiny_encoder.write_pooling(folder, "mean_tokens", "max_tokens")
    elif fault == "device":
        device = "abacus"
    elif isinstance(fault, str):
        (folder / fault).write_text("{")
    else:
        values = json.loads((folder / "config.json").read_text()) | fault
        kept = {key: value for key, value in values.items() if value != "left out"}
        (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=said):
        TextEncoder(EncoderConfig(str(folder), device=device))
    with pytest.raises(UserError, match="batch_size is 0"):
        EncoderConfig(str(folder), batch_size=0)
