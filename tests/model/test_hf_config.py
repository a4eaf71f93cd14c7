from __future__ import annotations

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.model.config import (
    LinearRope,
    Llama3Rope,
    LocalAttention,
    ModelConfig,
    YarnRope,
    warn_of_positions,
)
from coa_jax.model.hf_config import config_from_hf, config_to_hf, read_config

# As Qwen2.5 0.5B is released: transformers 4 form, a window that no layer uses.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "vocab_size": 151936,
}
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
# The entry with which the model cards of Qwen ask for 131,072 positions.
ORIGINAL = "original_max_position_embeddings"
YARN = {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}


def test_released_qwen25_config_is_understood():
    config = config_from_hf(QWEN25)
    assert (config.head_dim, config.num_groups, config.rope_theta) == (64, 7, 1e6)
    assert config.qkv_bias and config.tie_embeddings and not config.qk_norm


def test_whole_numbers_may_be_written_as_floats():
    floats = {
        key: float(value) if type(value) is int else value  # a bool stays a bool
        for key, value in QWEN25.items()
    }
    assert config_from_hf(floats) == config_from_hf(QWEN25)
    assert type(config_from_hf(floats).hidden_size) is int
    yarn = {**QWEN25, "rope_scaling": {**YARN, ORIGINAL: 32768.0}}
    assert config_from_hf(yarn) == config_from_hf({**QWEN25, "rope_scaling": YARN})
    for value in (896.5, float("inf"), float("nan"), "896"):
        with pytest.raises(UserError, match=r"hidden_size is .*; give a whole number"):
            config_from_hf({**QWEN25, "hidden_size": value})


def test_old_and_new_rope_forms_agree():
    new = {k: v for k, v in LLAMA32.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**LLAMA32["rope_scaling"], "rope_theta": 500000.0}
    assert config_from_hf(new) == config_from_hf(LLAMA32)
    assert config_from_hf(LLAMA32).rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)


def test_yarn_as_qwen_asks_for_it_is_understood():
    config = config_from_hf({**QWEN25, "rope_scaling": YARN})
    assert config.rope_scaling == YarnRope(4.0, 32768)
    assert (config.max_position, config.positions) == (32768, 131072)
    # The positions that a model card speaks of, and those of the weights where no entry does.
    for positions, original in ((131072, 32768), (40960, 32768), (32768, None)):
        hf = {**QWEN25, "max_position_embeddings": positions}
        hf["rope_scaling"] = {**YARN, ORIGINAL: original}
        assert config_from_hf(hf).positions == 131072
    assert config_from_hf(LLAMA32).positions == 131072
    assert config_from_hf(QWEN25).positions == 32768


def test_a_sequence_may_have_the_positions_that_yarn_gives(caplog):
    config = config_from_hf({**QWEN25, "rope_scaling": YARN})
    warn_of_positions(config, 131072, "row_length")
    assert caplog.text == ""
    warn_of_positions(config, 131073, "row_length")
    said = "for 131072 positions (original_max_position_embeddings times YaRN's factor)"
    assert said in caplog.text


def test_an_entry_for_yarn_is_written_as_it_was_read():
    hf = config_to_hf(config_from_hf({**QWEN25, "rope_scaling": YARN}), "bfloat16")
    assert {**hf["rope_scaling"], "type": "yarn"} == {**YARN, "rope_type": "yarn"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"mlp_bias": True}, "mlp_bias true"),
        *(
            ({"rope_scaling": {key: kind, "factor": 4.0}}, f"rope type '{kind}' is not supported")
            for key, kind in [
                ("rope_type", "dynamic"),
                ("rope_type", "longrope"),
                ("type", "mrope"),
            ]
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, "'attn_factor' of the yarn rope is not"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_slow 1 is above beta_fast 0.5"),
        ({"rope_scaling": {**YARN, "mscale": "x"}}, "mscale is 'x'; give a number above 0"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1; give True or False"),
        ({"rope_scaling": YARN, ORIGINAL: 16384}, f"{ORIGINAL} is outside rope_scaling"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta 1 is too small for yarn"),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            },
            "rope_parameters and rope_scaling differ; keep only the right entry",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn' is not an object"),
        ({"layer_types": 3}, "layer_types is 3; give a list"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "have no window without use_sl"),
        ({"layer_types": ["chunked_attention"]}, "layer type 'chunked_attention' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "16"}, "num_hidden_layers is '16'"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; give a whole number"),
        ({"num_key_value_heads": 5}, "not a multiple of num_kv_heads 5"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"head_dim": 0}, "head_dim is 0; give a whole number from 1"),
        (
            {"head_dim": None, "num_attention_heads": 2**15},
            "head_dim is 0; give a whole number from 1",
        ),
        ({"architectures": -1}, "architectures is -1; give a list"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; give .* to 10000"),
        ({"vocab_size": 10**400}, "vocab_size is a whole number of .* bits; give .* to 2147483647"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300; give a number above 0 and at most 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; give True or False"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor 4 is not below high_freq_factor 4",
        ),
    ],
)
def test_what_the_forward_pass_does_not_compute_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        config_from_hf({**LLAMA32, **change})


def test_a_window_is_read_if_layers_use_it():
    config = config_from_hf({**QWEN25, "max_window_layers": 21})
    assert config.local == LocalAttention(32768, (False,) * 21 + (True,) * 3)
    assert config_from_hf(QWEN25).local is None
    with pytest.raises(UserError, match="layer_types has 2 entries for 24 layers"):
        config_from_hf({**QWEN25, "layer_types": ["sliding_attention"] * 2})
    with pytest.raises(UserError, match="max_window_layers is None; give a whole number"):
        config_from_hf({**QWEN25, "max_window_layers": None})
    off = config_from_hf({**QWEN25, "max_window_layers": 21, "use_sliding_window": False})
    assert off.local is None


# As google/gemma-3-1b-it and the text part of google/gemma-3-4b-it are released.
GEMMA1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_released_gemma_configs_are_understood():
    small, large = config_from_hf(GEMMA1B), config_from_hf(GEMMA4B)
    for config in (small, large):
        assert config.architecture == "gemma3" and config.tie_embeddings and config.head_dim == 256
        full = [i for i, window in enumerate(config.windows) if window is None]
        assert full == list(range(5, config.num_layers, 6))
        assert (config.rope_theta, config.local.rope_theta) == (1e6, 1e4)
    assert (small.rope_scaling, small.local.window, small.max_position) == (None, 512, 32768)
    assert (large.rope_scaling, large.local.window) == (LinearRope(8.0), 1024)
    assert (large.num_heads, large.num_kv_heads, large.vocab_size) == (8, 4, 262208)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"sliding_window": 0}, "sliding_window is 0; give a whole number from 1"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
                }
            },
            "the rope of sliding_attention is scaled, which is not supported",
        ),
        ({"rope_parameters": {"sliding_attention": 3}}, "sliding_attention is 3"),
    ],
)
def test_what_gemma_does_not_have_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        config_from_hf({**GEMMA1B, **change})


def test_a_multimodal_config_without_a_text_model_is_refused():
    with pytest.raises(UserError, match="text_config is None"):
        config_from_hf({**GEMMA4B, "text_config": None})


def test_qwen3_attention_bias_is_refused():
    hf = {**QWEN25, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True}
    with pytest.raises(UserError, match="attention_bias true is not supported for qwen3"):
        config_from_hf(hf)


def test_unreadable_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: .*JSON object"):
        read_config(tmp_path)


@st.composite
def configs(draw) -> ModelConfig:
    architecture = draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma3"]))
    gemma = architecture == "gemma3"
    layers = draw(st.integers(1, 100))
    local = None
    if gemma or (architecture != "llama" and draw(st.booleans())):
        kinds = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        theta = draw(st.floats(1.0, 1e7, exclude_min=True)) if gemma else None
        local = LocalAttention(draw(st.integers(1, 10**5)), tuple(kinds), theta)
        local = local if gemma or any(kinds) else None
    kv = draw(st.integers(1, 4))
    heads, head_dim = kv * draw(st.integers(1, 4)), 2 * draw(st.integers(1, 64))
    yarn = st.builds(
        YarnRope,
        factor=st.floats(1.0, 64.0),
        original_max_position=st.integers(1, 10**6),
        beta_fast=st.floats(2.0, 64.0),
        beta_slow=st.floats(0.1, 2.0),
        attention_factor=st.none() | st.floats(0.1, 4.0),
        mscale=st.none() | st.floats(0.1, 2.0),
        mscale_all_dim=st.none() | st.floats(0.1, 2.0),
        truncate=st.booleans(),
    )
    known = [None, LinearRope(2.5), Llama3Rope(8.0, 1.0, 4.0, 64)]
    scaling = draw(st.sampled_from(known) | yarn)
    scalar = draw(st.none() | st.integers(2, 500) | st.floats(0.5, 500.0))
    return ModelConfig(
        architecture=architecture,
        vocab_size=draw(st.integers(1, 10**6)),
        hidden_size=draw(st.integers(1, 10**4)),
        intermediate_size=draw(st.integers(1, 10**5)),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        rope_theta=draw(st.floats(1.0, 1e7, exclude_min=True)),
        rope_scaling=scaling,
        local=local,
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        scale_embeddings=gemma,
        query_scalar=scalar if gemma and scalar != head_dim else None,
        rms_eps=draw(st.floats(1e-8, 1e-3)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        max_position=draw(st.integers(1, 10**6)),
    )


@given(configs())
def test_config_round_trips_through_both_forms(config):
    hf = config_to_hf(config, "bfloat16", [1, 2], 2)
    assert config_from_hf(hf) == config
    old = {k: v for k, v in hf.items() if k != "rope_parameters"}
    assert config_from_hf(old) == config
    whole = config.query_scalar is None or float(config.query_scalar).is_integer()
    # transformers insists on both.
    if config.hidden_size % config.num_heads == 0 and whole:
        theirs = transformers.AutoConfig.for_model(**hf).to_dict()
        assert config_from_hf({**theirs, "architectures": hf["architectures"]}) == config
