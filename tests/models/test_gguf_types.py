"""Whole GGUF models in each type that llama.cpp rounds to few bits, through LLM; and the factors that go with NVFP4."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import TOKENIZER, gguf_from_model, write_gguf
from folders import tiny_model
from maga_transformer import LLM
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.gguf_file import GgufFile
from maga_transformer.formats import Affine, open_quantized, read_weight

Q = gguf.GGMLQuantizationType
IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
TYPES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "NVFP4"]


def log_probabilities(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].double()
    assert logits.isfinite().all() and logits.abs().max() > 0.5
    return torch.log_softmax(logits, -1)[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].numpy()


def through_llm(path: Path) -> np.ndarray:
    with LLM(path, act_type="fp32", max_seq_len=64, kv_cache_mem_mb=16, threads=1) as llm:
        found: np.ndarray = llm.prompt_logprobs([IDS])[0]
    return found


@pytest.mark.parametrize("name", TYPES)
def test_a_model_of_one_type(name: str, tmp_path: Path) -> None:
    """Log probabilities are transformers' on the weights that gguf dequantised."""
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda _: Q[name], **TOKENIZER)
    checkpoint = open_checkpoint(str(path))
    assert {checkpoint.dtype(name) for name in checkpoint.names() if "norm" not in name} == {name.lower()}
    np.testing.assert_allclose(through_llm(path), log_probabilities(model), rtol=0, atol=1e-4)


def test_factors_of_nvfp4(tmp_path: Path) -> None:
    """As converted models have them: one number a linear, and one for activations that nothing here needs."""
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    factors = {"attn_q": 0.5, "attn_k": 1.75, "attn_output": 0.3, "ffn_up": 1.3, "ffn_down": 0.7}
    tables = {f"blk.0.{name}.scale": np.array([value], np.float32) for name, value in factors.items()}
    tables["blk.0.attn_q.input_scale"] = np.array([9.0], np.float32)
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda _: Q.NVFP4, tables=tables, **TOKENIZER)
    layer: Any = model.model.layers[0]
    linears = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    with torch.no_grad():
        for linear, factor in zip(linears, factors.values(), strict=True):
            linear.weight *= factor
    np.testing.assert_allclose(through_llm(path), log_probabilities(model), rtol=0, atol=1e-4)


def experts(path: Path, scale: np.ndarray) -> Path:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 127, (4, 32, 36), dtype=np.uint8)
    tensors = {
        "token_embd.weight": (random.normal(size=(8, 64)).astype(np.float32), Q.F32),
        "blk.0.ffn_up_exps.weight": (blocks, Q.NVFP4),
        "blk.0.ffn_up_exps.scale": (scale, Q.F32),
    }
    metadata = {"block_count": 1, "embedding_length": 64, "attention.head_count": 4, "expert_count": 4}
    return write_gguf(path, {f"qwen3moe.{key}": value for key, value in metadata.items()}, tensors, architecture="qwen3moe")


def test_each_expert_has_its_factor(tmp_path: Path) -> None:
    factors = np.array([1, 0.5, 3, 0.25], np.float32)
    path = experts(tmp_path / "model.gguf", factors)
    stored, checkpoint = GgufFile(str(path)), open_quantized(open_checkpoint(str(path)))
    values = gguf.quants.dequantize(stored.tensor("blk.0.ffn_up_exps.weight"), Q.NVFP4)
    for expert, factor in enumerate(factors):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        weight = read_weight(checkpoint, [name])
        assert isinstance(weight, Affine) and checkpoint.shape(name) == (32, 64)
        np.testing.assert_array_equal(weight.dequantize(), values[expert] * factor)
        checkpoint.release(name)


def test_factors_of_another_shape_are_refused(tmp_path: Path) -> None:
    checkpoint = open_quantized(open_checkpoint(str(experts(tmp_path / "model.gguf", np.ones((4, 2), np.float32)))))
    with pytest.raises(ValueError, match=r"model\.gguf: tensor model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight_scale has shape"):
        read_weight(checkpoint, ["model.layers.0.mlp.experts.1.up_proj.weight"])


@pytest.mark.parametrize("name", TYPES)
def test_blocks_that_are_cut_off(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda _: Q[name])
    last, tensor = max(GgufFile(str(path)).tensors.items(), key=lambda item: item[1].begin)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: tensor.begin + tensor.nbytes - 1])
    with pytest.raises(ValueError, match=rf"cut\.gguf: tensor {last} ends at byte .* truncated"):
        open_checkpoint(str(cut))
