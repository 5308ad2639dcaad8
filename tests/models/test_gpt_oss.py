"""gpt-oss as it is published, with experts in MXFP4: the values and the logits are those of transformers; and through GGUF."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import write_gguf
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import open_quantized, read_weight
from maga_transformer.formats.mxfp4 import affine
from maga_transformer.models import build_program
from runner import Runner
from safetensors.torch import load_file, save_file
from tiny_families import IDS, LENGTH, logits_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Q = gguf.GGMLQuantizationType
EXPERTS, HIDDEN, WIDTH = 8, 64, 96
SIZES = {"head_dim": 16, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS, "sliding_window": 8}
# The published model's, but for the original context.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}
LINEARS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
PARTS = {
    "gate": ("gate_up_proj", slice(0, None, 2)),
    "up": ("gate_up_proj", slice(1, None, 2)),
    "down": ("down_proj", slice(None)),
}

Tensors = dict[str, torch.Tensor]


def packed(seed: int) -> Tensors:
    """Blocks and exponents of all experts of a layer."""
    random, found = np.random.default_rng(seed), {}
    for name, (rows, columns) in LINEARS.items():
        blocks = random.integers(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=np.uint8)
        found[f"{name}_blocks"] = torch.from_numpy(blocks)
        exponents = random.integers(121, 126, (EXPERTS, rows, columns // 32), dtype=np.uint8)
        found[f"{name}_scales"] = torch.from_numpy(exponents)
    return found


def write(folder: Path) -> tuple[np.ndarray, Tensors]:
    """The logits that a folder in MXFP4 must give, and its tensors as transformers widens them."""
    model = tiny_model("gpt_oss", folder, **SIZES, rope_parameters=YARN)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for i, layer in enumerate(model.model.layers):
        module, parts = f"model.layers.{i}.mlp.experts.", packed(i)
        for name in LINEARS:
            wide = convert_moe_packed_tensors(parts[f"{name}_blocks"], parts[f"{name}_scales"], dtype=torch.bfloat16)
            with torch.no_grad():
                getattr(layer.mlp.experts, name).copy_(wide.float())
            del tensors[module + name]
        tensors |= {module + name: part for name, part in parts.items()}
    save_file(tensors, file)
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": not_converted})
    return logits_of(model), model.state_dict()


def test_golden_block() -> None:
    """By hand: the codes 0 to 15 twice, times a quarter; and a group of its own scale behind it."""
    blocks = np.array([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, [0x22] * 16]], np.uint8)
    values = affine(blocks, np.array([[125, 130]], np.uint8)).dequantize()
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    each = [number / 4 for number in numbers] + [-number / 4 for number in numbers]
    assert values.tolist() == [[*each, *each, *[8.0] * 32]]


def test_every_code_and_exponent_is_that_of_transformers() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(200, axis=1)
    scales = np.arange(20, 220, dtype=np.uint8)[None, :, None].repeat(16, axis=2)
    wide = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.bfloat16)
    np.testing.assert_array_equal(affine(blocks[0], scales[0]).dequantize(), wide[0].T.float().numpy())


def test_logits(tmp_path: Path) -> None:
    expected, wide = write(tmp_path)
    assert np.abs(expected).max() > 0.5
    checkpoint = open_checkpoint(str(tmp_path))
    for backend in (_core.reference_backend(), _core.cpu_backend(threads=1, quantize_activations=False)):
        runner = Runner(backend, checkpoint, length=LENGTH, tokens=LENGTH)
        np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(runner.logits(IDS, [20, *[1] * 40]), expected, rtol=0, atol=1e-4)
    opened = open_quantized(checkpoint)
    program, _ = build_program(checkpoint)
    assert sum(opened.nbytes(name) for name in opened.names()) == sum(checkpoint.nbytes(name) for name in checkpoint.names())
    for name, sources, _ in program.weights:
        if name.endswith("experts.down"):
            values = np.stack([read_weight(opened, [source]).dequantize() for source in sources])
            want = wide[name.replace("experts.down", "experts.down_proj")].float().numpy().swapaxes(1, 2)
            np.testing.assert_array_equal(values, want)


def test_damaged_experts_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, module = load_file(file), "model.layers.1.mlp.experts."
    scales = f"{module}down_proj_scales"
    save_file({name: tensor for name, tensor in tensors.items() if name != scales}, file)
    with pytest.raises(ValueError, match=rf"tensor {scales} is missing"):
        build_program(open_checkpoint(str(tmp_path)))
    save_file({**tensors, scales: tensors[scales][:, :, :1].contiguous()}, file)
    program, _ = build_program(open_checkpoint(str(tmp_path)))
    opened = open_quantized(open_checkpoint(str(tmp_path)))
    sources = next(sources for name, sources, _ in program.weights if name == f"{module}down")
    with pytest.raises(ValueError, match=rf"tensor {scales} has shape .*, expected \(8, 64, 3\)"):
        read_weight(opened, sources[:1])
    blocks = f"{module}gate_up_proj_blocks"
    save_file({**tensors, blocks: tensors[blocks][..., :8].contiguous()}, file)
    with pytest.raises(ValueError, match=rf"tensor {blocks} has shape .*, expected \(experts, rows, blocks, 16\)"):
        build_program(open_checkpoint(str(tmp_path)))


def gguf_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """As llama.cpp's converter repacks them: the exponent, and then element j beside element j + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(*blocks.shape[:2], -1).astype(np.uint8)


def test_logits_through_gguf(tmp_path: Path) -> None:
    expected, wide = write(tmp_path / "folder")
    config: dict[str, Any] = json.loads((tmp_path / "folder" / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 3)
    stored: dict[str, tuple[np.ndarray, Q]] = {}
    for name, tensor in wide.items():
        if ".experts." not in name:
            base, _, kind = name.rpartition(".")
            found = names.get_name(base) or names.get_name(name)
            assert found, name
            stored[f"{found}.{'weight' if kind == 'sinks' else kind}"] = (tensor.float().numpy(), Q.F32)
    for i in range(3):
        parts = {name: part.numpy() for name, part in packed(i).items()}
        biases = {name: wide[f"model.layers.{i}.mlp.experts.{name}_bias"].numpy() for name in LINEARS}
        for name, (linear, rows) in PARTS.items():
            blocks = gguf_blocks(parts[f"{linear}_blocks"][:, rows], parts[f"{linear}_scales"][:, rows])
            stored[f"blk.{i}.ffn_{name}_exps.weight"] = (blocks, Q.MXFP4)
            stored[f"blk.{i}.ffn_{name}_exps.bias"] = (np.ascontiguousarray(biases[linear][:, rows]), Q.F32)
    metadata = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": HIDDEN,
        "block_count": 3,
        "feed_forward_length": WIDTH,
        "expert_feed_forward_length": WIDTH,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.sliding_window": 8,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": YARN["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": YARN["factor"],
        "rope.scaling.original_context_length": YARN["original_max_position_embeddings"],
        "expert_count": EXPERTS,
        "expert_used_count": config["num_experts_per_tok"],
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, {f"gpt-oss.{key}": value for key, value in metadata.items()}, stored, architecture="gpt-oss")
    checkpoint = open_checkpoint(str(path))
    runner = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH)
    assert runner.family.model_type == "gpt_oss" and checkpoint.dtype("model.layers.0.mlp.experts.3.up_proj.weight") == "mxfp4"
    np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)
