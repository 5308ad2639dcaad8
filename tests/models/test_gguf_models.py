"""Models through GGUF: quantised files give the logits of transformers on the same dequantised weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import TOKENIZER, gguf_from_model
from folders import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.gguf_file import GgufFile
from maga_transformer.models import build_program
from maga_transformer.tokenizer import load_tokenizer
from runner import Runner

IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32
Q = gguf.GGMLQuantizationType


def compare(model: torch.nn.Module, path: Path) -> _core.Program:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.5
    for backend in (_core.reference_backend(), _core.cpu_backend(threads=1, quantize_activations=False)):
        runner = Runner(backend, open_checkpoint(str(path)), length=len(IDS), tokens=len(IDS))
        np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4, err_msg=backend.describe())
    return runner.program


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "Q4_1", "Q8_0"])
def test_logits(kind: str, sizes: dict, quantization: str, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "folder", **{**SIZES, **sizes})
    metadata = {f"{kind}.attention.key_length": sizes["head_dim"]} if "head_dim" in sizes else {}
    quantize = None if quantization == "none" else lambda name: Q[quantization]
    program = compare(model, gguf_from_model(model, tmp_path / "model.gguf", quantize, **metadata))
    assert program.max_positions == 256


def test_tensors_64_bytes_apart(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda name: Q.Q4_1, alignment=64)
    assert all(tensor.begin % 64 == 0 for tensor in GgufFile(str(path)).tensors.values())
    compare(model, path)


def test_mixed_types_of_one_layer(tmp_path: Path) -> None:
    """As K-quant mixtures have it: v in a wider type than q and k. Those two stay one matrix, v becomes its own."""
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda name: Q.Q8_0 if "attn_v" in name or "output." in name else Q.Q4_0)
    program = compare(model, path)
    names = [name for name, _, _ in program.weights if ".0.self_attn." in name]
    prefix = "model.layers.0.self_attn"
    assert names == [f"{prefix}.(q_proj|k_proj).weight", f"{prefix}.v_proj.weight", f"{prefix}.o_proj.weight"]


def test_k_quants(tmp_path: Path) -> None:
    """A mixture of all five, as Q4_K_M and Q2_K files have them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = tiny_model("llama", tmp_path / "folder", **sizes)
    kinds = {"attn_v": Q.Q6_K, "ffn_down": Q.Q5_K, "attn_output": Q.Q2_K, "ffn_up": Q.Q3_K, "ffn_gate": Q.Q3_K}
    path = gguf_from_model(model, tmp_path / "model.gguf", lambda name: kinds.get(name.split(".")[-2], Q.Q4_K))
    compare(model, path)
    assert {open_checkpoint(str(path)).dtype(name) for name in open_checkpoint(str(path)).names()} == {
        "fp32", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    }  # fmt: skip


def test_llama3_scaling_as_divisors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 5000.0, "original_max_position_embeddings": 32, **scaling}
    model = tiny_model("llama", tmp_path / "folder", rope_parameters=rope, **SIZES)
    plain = 5000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 7.9 and divisors.min() < 1.01
    path = gguf_from_model(model, tmp_path / "model.gguf", tables={"rope_freqs.weight": divisors})
    compare(model, path)


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
        ),
    ],
)
def test_rope_scaling_keys(scaling: dict, metadata: dict, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", rope_parameters={"rope_theta": 5000.0, **scaling}, **SIZES)
    compare(model, gguf_from_model(model, tmp_path / "model.gguf", **metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "num_key_value_heads_per_layer says 1 for layer 1, whose tensors have 2"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling type 'longrope'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "with attn_factor 2.0, is not supported"),
        ({"llama.rope.freq_base": "high"}, r"llama\.rope\.freq_base is 'high', expected a number"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is there, but not blk\.0\.ffn_gate_inp\.weight"),
        ({"llama.embedding_length": 96}, r"tensor model\.embed_tokens\.weight has shape"),
    ],
)
def test_metadata_that_is_refused(metadata: dict, message: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", **metadata)
    with pytest.raises(ValueError, match=message) as error:
        build_program(open_checkpoint(str(path)))
    assert "model.gguf" in str(error.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=2))
def test_changed_metadata_builds_or_is_refused(changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """As far as a server goes before it packs weights: reader, program and tokenizer raise nothing but clear errors."""
    folder = tmp_path_factory.getbasetemp()
    good, damaged = folder / "good-model.gguf", folder / "damaged-model.gguf"
    if not good.exists():
        gguf_from_model(tiny_model("llama", folder / "good-model", **SIZES), good, **TOKENIZER)
    data = bytearray(good.read_bytes())
    header = min(tensor.begin for tensor in GgufFile(str(good)).tensors.values())
    for position, byte in changes:
        data[position % header] = byte
    damaged.write_bytes(data)
    try:
        checkpoint = open_checkpoint(str(damaged))
        load_tokenizer(None, checkpoint).encode("t1t2")
        build_program(checkpoint)
    except ValueError as error:
        assert "damaged-model.gguf" in str(error)


def test_unknown_architecture(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", **SIZES)
    path = gguf_from_model(model, tmp_path / "model.gguf", architecture="rwkv")
    with pytest.raises(ValueError, match=r"architecture 'rwkv' is not supported .of GGUF: llama"):
        build_program(open_checkpoint(str(path)))
