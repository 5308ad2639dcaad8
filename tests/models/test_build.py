"""What the builder makes of a checkpoint: its program, and the refusals of checkpoints that do not fit their config."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program, families
from runner import Runner
from safetensors.torch import load_file, save_file


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def build(folder: Path, model_type: str | None = None) -> _core.Program:
    return build_program(open_checkpoint(str(folder)), model_type)[0]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_model("llama", tmp_path)
    return tmp_path


def test_program_is_plain_ops(llama: Path) -> None:
    program = build(llama)
    layer = ["norm", "linear", "rope", "rope", "attention", "linear", "add", "norm", "linear", "activation", "linear", "add"]
    assert [op["op"] for op in program.ops] == ["embed", *layer * 3, "select", "norm", "linear"]
    assert (program.family, program.vocab, program.max_positions) == ("llama", 96, 256)
    assert program.cache_layers == [(2, 12, 12)] * 3
    names = [name for name, _, _ in program.weights]
    assert "model.layers.1.self_attn.(q_proj|k_proj|v_proj).weight" in names
    shapes = {name: shape for name, _, shape in program.weights}
    assert shapes["model.layers.1.mlp.(gate_proj|up_proj).weight"] == [160, 48]


def test_families_by_every_name() -> None:
    known = families()
    assert known["llama"] is known["LlamaForCausalLM"]
    assert known["qwen_2"] is known["qwen2"] is known["Qwen2ForCausalLM"]
    assert known["qwen_3"].architectures == ("Qwen3ForCausalLM",)
    assert known["mistral"] is not known["llama"]
    assert known["Yi"] is known["llama"]
    of_all = [name for family in set(known.values()) for name in (family.model_type, *family.aliases)]
    assert len(of_all) == len(set(of_all))


# The names that RTP-LLM takes for decoders without experts, and the architectures that it finds them by.
MODEL_TYPES = {
    "llama": ["LlamaForCausalLM", "YiForCausalLM"],
    "internlm": ["InternLMForCausalLM"],
    "internlm2": ["InternLM2ForCausalLM"],
    "xverse": ["XverseForCausalLM"],
    "aquila": ["AquilaModel"],
    "mistral": ["MistralForCausalLM"],
    "baichuan": ["BaichuanForCausalLM", "BaiChuanForCausalLM"],
    "gemma": ["GemmaForCausalLM"],
    "cohere": ["CohereForCausalLM"],
    "qwen qwen_7b qwen_13b qwen_1b8 qwen_agent qwen_tool": ["QWenLMHeadModel"],
    "qwen_2": ["Qwen2ForCausalLM"],
    "qwen_3": ["Qwen3ForCausalLM"],
    "chatglm chat_glm": ["ChatGLMModel", "ChatGLMForConditionalGeneration"],
    "bloom sgpt_bloom": ["BloomForCausalLM"],
    "falcon": ["FalconForCausalLM", "RWForCausalLM"],
    "mpt": ["MPTForCausalLM", "MptForCausalLM"],
    "phi": ["PhiForCausalLM"],
    "gpt_neox gpt_neox_13b": ["GPTNeoXForCausalLM"],
    "gpt_bigcode wizardcoder": ["GPTBigCodeForCausalLM"],
    "starcoder2": ["Starcoder2ForCausalLM"],
}


@pytest.mark.parametrize("names", MODEL_TYPES)
def test_names_of_model_types(names: str) -> None:
    known = families()
    found = {known[name] for name in [*names.split(), *MODEL_TYPES[names]]}
    assert len(found) == 1
    for second in ("baichuan2", "chatglm2 chat_glm_2", "chatglm3 chat_glm_3 chatglm4"):
        assert len({known[name] for name in second.split()}) == 1


def test_a_name_that_is_nearly_right(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"'qwen-2' is not known; did you mean qwen2 or qwen_2 or qwen.* \(model types: llama"):
        build(llama, "qwen-2")
    edit_config(llama, architectures=["LlamaForCausalML"])
    with pytest.raises(ValueError, match=r"architecture 'LlamaForCausalML' is not supported; did you mean LlamaForCausalLM or"):
        build(llama)


def test_model_type(llama: Path) -> None:
    assert build(llama, "llama").family == "llama"
    with pytest.raises(ValueError, match=r"'gpt9' is not known; did you mean gpt2\? .model types: llama, mistral, "):
        build(llama, "gpt9")
    with pytest.raises(ValueError, match=r"'qwen_2' does not fit .*type 'llama'"):
        build(llama, "qwen_2")
    edit_config(llama, architectures=["NoSuchForCausalLM"])
    with pytest.raises(ValueError, match=r"architecture 'NoSuchForCausalLM' is not supported; did you mean .*model types: llama"):
        build(llama)
    assert build(llama, "llama").family == "llama"  # the user knows better
    edit_config(llama, architectures=None)
    assert build(llama).family == "llama"  # config.json's model_type


BAD_CONFIGS = {
    "hidden_size": (0, "hidden_size is 0"),
    "num_hidden_layers": (4, r"model\.layers\.3\.input_layernorm\.weight is missing"),
    "num_attention_heads": (5, "num_key_value_heads is 2, expected a divisor"),
    "num_key_value_heads": (3, "num_key_value_heads is 3"),
    "intermediate_size": (-1, "intermediate_size is -1"),
    "head_dim": (1.5, "head_dim is 1.5"),
    "rms_norm_eps": ("small", "rms_norm_eps is 'small'"),
    "vocab_size": (97, r"tensor model\.embed_tokens\.weight has shape \(96, 48\), expected \(97, 48\)"),
    "hidden_act": ("swiglu", "activation 'swiglu' is not supported .supported: silu"),
    "tie_word_embeddings": ("yes", "tie_word_embeddings is 'yes'"),
    "rope_parameters": (
        {"rope_type": "spiral", "rope_theta": 1e4},
        "rope type 'spiral' is not supported .supported: default, linear",
    ),
    "max_position_embeddings": (True, "max_position_embeddings is True"),
    "attention_bias": (True, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is missing .expected shape .48."),
    "quantization_config": ({"quant_method": "quip"}, "quantization_config with quant_method 'quip' is not supported"),
}


@pytest.mark.parametrize("key", BAD_CONFIGS)
def test_bad_config_names_the_key_or_tensor(key: str, llama: Path) -> None:
    value, message = BAD_CONFIGS[key]
    edit_config(llama, **{key: value})
    with pytest.raises(ValueError, match=message) as error:
        build(llama)
    assert str(llama) in str(error.value)


def test_absurd_sizes_allocate_nothing(llama: Path) -> None:
    edit_config(llama, hidden_size=2**39, head_dim=None)
    with pytest.raises(ValueError, match=r"head_dim is 137438953472, expected at most 65536 .hidden_size is 549755813888."):
        build(llama)


def test_absent_keys(llama: Path) -> None:
    expected = build(llama).ops
    edit_config(llama, intermediate_size=None, vocab_size=None)
    assert build(llama).ops == expected  # the tensors say it
    edit_config(llama, hidden_size=None)
    with pytest.raises(ValueError, match="config has no key hidden_size"):
        build(llama)


def test_missing_surplus_and_misshapen_tensors(llama: Path) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    good = load_file(llama / "model.safetensors")[down]
    edit_tensors(llama, **{down: good[:, :-1].contiguous()})
    with pytest.raises(
        ValueError,
        match=r"tensor model\.layers\.1\.mlp\.gate_proj\.weight has shape \(80, 48\), expected \(79, 48\)",
    ):
        build(llama)
    edit_tensors(llama, **{down: good[0].contiguous()})
    with pytest.raises(ValueError, match=rf"tensor {down} has shape \(80,\), expected \(48, 80\)"):
        build(llama)
    edit_tensors(llama, **{down: None})
    with pytest.raises(ValueError, match=rf"tensor {down} is missing .expected shape \(48, 80\)"):
        build(llama)
    edit_tensors(llama, **{down: good, "model.layers.1.mlp.extra.weight": good.clone()})
    edit_tensors(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": good.clone()})
    with pytest.raises(ValueError, match=r"no place for these tensors: model\.layers\.1\.mlp\.extra\.weight$"):
        build(llama)
    edit_tensors(llama, **{"model.layers.1.mlp.extra.weight": None})
    build(llama)  # the buffer is known


def test_more_layers_than_the_config_says(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"no place for these tensors: model\.layers\.2\..*and 4 more"):
        build(llama)


def logits(folder: Path) -> np.ndarray:
    return Runner(_core.reference_backend(), open_checkpoint(str(folder)), length=8, tokens=8).logits([5, 6, 7])


def vocabulary_weights(folder: Path) -> int:
    return sum("embed_tokens" in name or "lm_head" in name for name, _, _ in build(folder).weights)


def test_tied_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sglang PR #1508, vllm PR #6758: the embedding and the head: one of them, both equal, both different."""
    tiny_model("llama", tmp_path, tie_word_embeddings=True)
    assert vocabulary_weights(tmp_path) == 1
    expected = logits(tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    edit_tensors(tmp_path, **{"lm_head.weight": table.clone()})
    assert vocabulary_weights(tmp_path) == 1
    np.testing.assert_array_equal(logits(tmp_path), expected)

    edit_tensors(tmp_path, **{"model.embed_tokens.weight": None})
    np.testing.assert_array_equal(logits(tmp_path), expected)

    edit_tensors(tmp_path, **{"model.embed_tokens.weight": table, "lm_head.weight": 2 * table})
    with caplog.at_level(logging.WARNING):
        np.testing.assert_allclose(logits(tmp_path), 2 * expected, rtol=1e-6)
    assert vocabulary_weights(tmp_path) == 2
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text


@pytest.mark.parametrize("key", [False, None])
def test_untied_without_a_head_is_refused(key: bool | None, tmp_path: Path) -> None:
    """vllm PR #6758, transformers #34759: never rows at random."""
    tiny_model("llama", tmp_path, tie_word_embeddings=True)
    edit_config(tmp_path, tie_word_embeddings=key)
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight is missing"):
        build(tmp_path)


def test_layer_types_of_another_length(tmp_path: Path) -> None:
    tiny_model("qwen2", tmp_path)
    edit_config(tmp_path, layer_types=["full_attention"])
    with pytest.raises(ValueError, match=r"layer_types is .*a list of 3 names"):
        build(tmp_path)


def test_windows_reach_the_right_layers(tmp_path: Path) -> None:
    tiny_model("qwen2", tmp_path)
    edit_config(tmp_path, layer_types=None, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    assert [op["window"] for op in build(tmp_path).ops if op["op"] == "attention"] == [0, 0, 9]
    edit_config(tmp_path, max_window_layers=0)
    assert [op["window"] for op in build(tmp_path).ops if op["op"] == "attention"] == [9, 9, 9]


def test_formats_that_differ_stay_apart(tmp_path: Path) -> None:
    """q and k in fp32, v in bf16: two linears into one value, with the logits of the widened model."""
    tiny_model("llama", tmp_path)
    names = [f"model.layers.{i}.self_attn.v_proj.weight" for i in range(3)]
    tensors = load_file(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, **{name: tensors[name].bfloat16() for name in names})
    sources = [sources for _, sources, _ in build(tmp_path).weights if "v_proj" in sources[-1] or "k_proj" in sources[-1]]
    assert sources[:2] == [[f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk"], names[:1]]
    mixed = logits(tmp_path)
    edit_tensors(tmp_path, **{name: tensors[name].bfloat16().float() for name in names})
    np.testing.assert_allclose(mixed, logits(tmp_path), rtol=0, atol=1e-6)


def test_config_is_json(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config) + "}")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        build(llama)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([10**9, 2**70]),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta"]), st.sampled_from(["yarn", "linear", 2, 0, None, []])
    ),
)
KEYS = [
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "max_position_embeddings", "attention_bias", "mlp_bias", "layer_types", "use_sliding_window", "sliding_window",
    "max_window_layers", "quantization_config", "partial_rotary_factor", "original_max_position_embeddings",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=3), kind=st.sampled_from(["llama", "qwen2"]))
def test_odd_configs_build_or_are_refused(changes: dict, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / f"odd-{kind}"
    if not folder.exists():
        tiny_model(kind, folder)
    checkpoint = open_checkpoint(str(folder))
    checkpoint.config.update(changes)
    try:
        build_program(checkpoint)
    except ValueError as error:
        assert str(folder) in str(error)
