"""Checkpoints of other people's quantisers: each method's bits against its definition, and whole models against transformers
with the dequantised weights. The golden vectors are what compressed-tensors 0.20.1 packs, and makes of AWQ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import Source, open_checkpoint, stored_bytes
from maga_transformer.formats import Affine, Dense, Float8, open_quantized, read_weight
from maga_transformer.formats.canonical import E4M3
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from runner import Runner
from safetensors.torch import load_file, save_file

GOLDEN = json.loads((Path(__file__).parent / "quantized_golden.json").read_text())
IDS = np.random.default_rng(3).integers(0, 96, 30).tolist()
Tensors = dict[str, torch.Tensor]


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """(rows, n) codes -> (rows, words): one code after the other, bit by bit."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for i in range(count):
        for bit in range(bits):
            at = i * bits + bit
            words[:, at // 32] |= ((codes[:, i].astype(np.uint32) >> bit) & 1) << (at % 32)
    return words.view(np.int32)


def rounded_codes(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (N, K), scales and zeros (N, groups), to nearest."""
    blocks = w.reshape(len(w), -1, group)
    low, high = blocks.min(-1), blocks.max(-1)
    top = (1 << bits) - 1
    if symmetric:
        scale = np.maximum(np.abs(low), np.abs(high)) / (top // 2)
        zero = np.full(scale.shape, (top + 1) // 2)
    else:
        scale = (high - low) / top
        zero = np.clip(np.rint(-low / scale), 0, top).astype(int)
    scale = scale.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(w.shape).astype(np.uint8), scale, zero


def gptq(
    w: np.ndarray, bits: int, group: int, symmetric: bool, *, version: int = 1, ordered: bool = False
) -> tuple[Tensors, np.ndarray]:
    columns = w.shape[1]
    order = np.random.default_rng(len(w)).permutation(columns) if ordered else np.arange(columns)
    codes, scale, zero = rounded_codes(w[:, order], bits, group, symmetric)
    groups = np.empty(columns, np.int32)
    groups[order] = np.arange(columns) // group
    back = np.argsort(order)
    codes = codes[:, back]
    stored = (zero - (version == 1)) & ((1 << bits) - 1)
    tensors = {
        "qweight": torch.from_numpy(packed(codes, bits).T.copy()),
        "qzeros": torch.from_numpy(packed(stored.T, bits)),
        "scales": torch.from_numpy(scale.T.copy()).half(),
        "g_idx": torch.from_numpy(groups),
    }
    return tensors, scale[:, groups] * (codes.astype(np.float32) - zero[:, groups])


def awq(w: np.ndarray, group: int) -> tuple[Tensors, np.ndarray]:
    codes, scale, zero = rounded_codes(w, 4, group, False)

    def words(values: np.ndarray) -> torch.Tensor:  # (K, N) -> (K, N / 8)
        nibbles = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return torch.from_numpy(packed(nibbles.reshape(values.shape), 4))

    tensors = {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": torch.from_numpy(scale.T.copy()).half()}
    return tensors, np.repeat(scale, group, 1) * (codes.astype(np.float32) - np.repeat(zero, group, 1))


def fp8(w: np.ndarray, scales: str, block_scales: str = "weight_scale_inv") -> tuple[Tensors, np.ndarray]:
    if scales == "block":
        padded = np.zeros((-(-w.shape[0] // 32) * 32, -(-w.shape[1] // 32) * 32), np.float32)
        padded[: w.shape[0], : w.shape[1]] = w
        size = np.abs(padded.reshape(len(padded) // 32, 32, -1, 32)).max((1, 3)) / 448
        whole = np.repeat(np.repeat(size, 32, 0), 32, 1)[: w.shape[0], : w.shape[1]]
    else:
        size = np.abs(w).max(1, keepdims=True) / 448 if scales == "row" else np.abs(w).max().reshape(()) / 448
        whole = size
    codes = torch.from_numpy(w / whole).to(torch.float8_e4m3fn)
    name = block_scales if scales == "block" else "weight_scale"
    size = np.asarray(size, np.float32)
    return {"weight": codes, name: torch.from_numpy(size)}, codes.float().numpy() * whole.astype(np.float32)


def pack_quantized(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[Tensors, np.ndarray]:
    codes, scale, zero = rounded_codes(w, bits, group, symmetric)
    tensors = {
        "weight_packed": torch.from_numpy(packed(codes, bits)),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(packed(zero.T, bits).T.copy())
    return tensors, np.repeat(scale, group, 1) * (codes.astype(np.float32) - np.repeat(zero, group, 1))


def int8(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.abs(w).max(1, keepdims=True) / 127
    codes = np.rint(w / scale).astype(np.int8)
    return {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scale.astype(np.float32))}, scale * codes


def ct(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


Quantise = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
METHODS: dict[str, tuple[dict[str, Any], Quantise]] = {
    **{
        f"gptq-{bits}{'' if symmetric else '-zeros'}": (
            {"quant_method": "gptq", "bits": bits, "group_size": 16, "sym": symmetric, "desc_act": False},
            lambda w, bits=bits, symmetric=symmetric: gptq(w, bits, 16, symmetric),
        )
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    },
    "gptq-channel": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, lambda w: gptq(w, 4, w.shape[1], True)),
    **{
        f"gptq-v2-{bits}": (
            {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": "gptq_v2"},
            lambda w, bits=bits: gptq(w, bits, 16, False, version=2),
        )
        for bits in (2, 3, 4, 8)  # vllm PR #26092: one was added to zeros of the second version
    },
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda w: gptq(w, 4, 16, False, ordered=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True}, lambda w: awq(w, 16)),
    "fp8-tensor": ({"quant_method": "fp8"}, lambda w: fp8(w, "tensor")),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda w: fp8(w, "block")),
    "ct-fp8-tensor": (ct("float-quantized", type="float", num_bits=8, strategy="tensor"), lambda w: fp8(w, "tensor")),
    "ct-fp8-block": (
        ct("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[32, 32]),
        lambda w: fp8(w, "block", "weight_scale"),
    ),
    "ct-fp8-row": (ct("float-quantized", type="float", num_bits=8, strategy="channel"), lambda w: fp8(w, "row")),
    **{
        f"ct-int{bits}{'' if symmetric else '-zeros'}": (
            ct("pack-quantized", type="int", num_bits=bits, strategy="group", group_size=16, symmetric=symmetric),
            lambda w, bits=bits, symmetric=symmetric: pack_quantized(w, bits, 16, symmetric),
        )
        for bits in (4, 8)
        for symmetric in (True, False)
    },
    "ct-w8a8": (ct("int-quantized", type="int", num_bits=8, strategy="channel"), int8),
}


def quantised_model(method: str, folder: Path, *, kind: str = "qwen2", kept: str = "", head: bool = False) -> np.ndarray:
    """A tiny Qwen2 (it has biases) whose layers are quantised; the logits of transformers with the dequantised weights. `kept`:
    a part of the names of linears that are not quantised; `head`: whether lm_head is."""
    settings, quantise = METHODS[method]
    model: Any = tiny_model(kind, folder, hidden_size=64, intermediate_size=96, pad_token_id=0)
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    state = model.state_dict()
    for name, tensor in load_file(file).items():
        if tensor.ndim == 2 and (".layers." in name or (head and name == "lm_head.weight")) and not (kept and kept in name):
            parts, values = quantise(tensor.float().numpy())
            state[name].copy_(torch.from_numpy(values))
            tensors.update({name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()})
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    edit_config(folder, quantization_config=settings)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("method", METHODS)
def test_models(method: str, tmp_path: Path) -> None:
    expected = quantised_model(method, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    for backend in (_core.reference_backend(), _core.cpu_backend(threads=1, quantize_activations=False)):
        found = Runner(backend, checkpoint, length=30, tokens=30).logits(IDS)
        as_bf16 = method == "gptq-order" or ("fp8" in method and backend.describe().startswith("cpu"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-2 if as_bf16 else 1e-4)
    program, _ = build_program(checkpoint)
    layers = [sources for name, sources, shape in program.weights if ".layers." in name and len(shape) == 2]
    form = Float8 if "fp8" in method else Dense if method == "gptq-order" else Affine
    assert all(isinstance(read_weight(open_quantized(checkpoint), sources), form) for sources in layers)
    assert any(len(sources) == 3 for sources in layers), "q, k and v become one matrix"


def test_gptq_linears_with_and_without_zeros_are_stacked(tmp_path: Path) -> None:
    """Whether all zeros of a linear are the middle one is seen only once it is read."""
    random = np.random.default_rng(0)
    tensors, expected = {}, {}
    for name, symmetric in (("q", True), ("k", False), ("v", True)):
        parts, expected[name] = gptq(random.normal(0, 1, (32, 64)).astype(np.float32), 4, 16, symmetric)
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    checkpoint = open_quantized(open_checkpoint(str(tmp_path)))
    assert len({checkpoint.dtype(f"{name}.weight") for name in expected}) == 1
    for order in ("qk", "kq", "qv", "vkq"):
        stacked = read_weight(checkpoint, [f"{name}.weight" for name in order])
        assert isinstance(stacked, Affine) and (stacked.offset is None) == (order == "qv")
        np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([expected[name] for name in order]))


def test_codes_of_compressed_tensors(tmp_path: Path) -> None:
    for bits, case in GOLDEN["packed"].items():
        values, zeros = np.array(case["values"]), np.array(case["zeros"])
        tensors = {
            "m.weight_packed": torch.tensor(case["weight_packed"], dtype=torch.int32),
            "m.weight_zero_point": torch.tensor(case["weight_zero_point"], dtype=torch.int32),
            "m.weight_scale": torch.full((16, 3), 0.5),
            "m.weight_shape": torch.tensor([16, 96]),
        }
        folder = tmp_path / bits
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({"quantization_config": ct("pack-quantized", type="int", num_bits=int(bits))})
        )
        checkpoint = open_quantized(open_checkpoint(str(folder)))
        found = read_weight(checkpoint, ["m.weight"]).dequantize()
        np.testing.assert_array_equal(found, 0.5 * (values - np.repeat(zeros, 32, 1)))


def test_codes_of_awq(tmp_path: Path) -> None:
    case = GOLDEN["awq"]
    tensors = {f"m.{part}": torch.tensor(case[part], dtype=torch.int32) for part in ("qweight", "qzeros")}
    save_file({**tensors, "m.scales": torch.tensor(case["scales"]).half()}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_quantized(open_checkpoint(str(tmp_path)))
    np.testing.assert_allclose(read_weight(checkpoint, ["m.weight"]).dequantize(), case["weight"], rtol=1e-6)


def test_e4m3() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)


def test_scales_of_fp8(tmp_path: Path) -> None:
    """Parts with a scale each, blocks that end within a part, and a static scale of activations, which is read and not used."""
    random = np.random.default_rng(8)
    codes = {name: torch.from_numpy(random.normal(0, 60, (rows, 200)).astype(np.float32)) for name, rows in (("q", 128), ("k", 96))}
    codes = {name: values.to(torch.float8_e4m3fn) for name, values in codes.items()}
    blocks = {name: torch.from_numpy(random.uniform(0.1, 2, (1, 2)).astype(np.float32)) for name in codes}
    for suffix, scales, settings in (
        ("weight_scale", {"q": torch.tensor(0.25), "k": torch.tensor([0.5])}, {"activation_scheme": "static"}),
        ("weight_scale_inv", blocks, {"weight_block_size": [128, 128]}),
    ):
        tensors = {f"{name}.weight": values for name, values in codes.items()}
        tensors |= {f"{name}.{suffix}": values for name, values in scales.items()}
        tensors |= {f"{name}.input_scale": torch.tensor(0.01) for name in codes}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8", **settings}}))
        checkpoint = open_quantized(open_checkpoint(str(tmp_path)))
        assert sorted(checkpoint.names()) == ["k.weight", "q.weight"]
        columns = 200 if suffix == "weight_scale" else 128  # that share a scale
        wide = {name: np.repeat(values.numpy().reshape(1, -1), columns, 1)[:, :200] for name, values in scales.items()}
        expected = {name: codes[name].float().numpy() * wide[name] for name in codes}
        for order in (["q", "k"], ["k", "q"], ["q", "q"]):
            stacked = read_weight(checkpoint, [f"{name}.weight" for name in order])
            assert isinstance(stacked, Float8)
            np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([expected[name] for name in order]))
            backend = _core.reference_backend()
            assert backend.pack_float8("w", stacked.codes.shape, stacked.codes, block=stacked.block, scale=stacked.scale).bytes
        part = read_weight(checkpoint, [str(Source("q.weight", 8, 24, 64))])
        np.testing.assert_array_equal(part.dequantize(), expected["q"].reshape(2, 64, 200)[:, 8:24].reshape(-1, 200))


def test_rows_and_sizes(tmp_path: Path) -> None:
    quantised_model("awq", tmp_path)
    plain = open_checkpoint(str(tmp_path))
    checkpoint = open_quantized(plain)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert checkpoint.shape(name) == (96, 64)
    whole = read_weight(checkpoint, [name]).dequantize()
    np.testing.assert_array_equal(
        read_weight(checkpoint, [str(Source(name, 8, 24, 48))]).dequantize(), whole.reshape(2, 48, 64)[:, 8:24].reshape(-1, 64)
    )
    module = name.removesuffix("weight")
    assert stored_bytes(checkpoint, [name]) == sum(plain.nbytes(module + part) for part in ("qweight", "qzeros", "scales"))
    with pytest.raises(ValueError, match=r"gate_proj\.weight is quantised \(awq by 16\): it cannot be transposed"):
        read_weight(checkpoint, [str(Source(name, layout="transposed"))])


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"quant_method": "exl2"}, r"quant_method 'exl2' is not supported \(supported: gptq, awq, fp8, compressed-tensors, "),
        ({"quant_method": "gptq", "bits": 5}, r"bits is 5, which is not supported \(supported: 2, 3, 4, 8\)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, expected a positive integer"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin's own layout is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic .* is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "checkpoint_format is 'bitblas'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "expected an object of groups"),
        ([4], r"quantization_config is \[4\], expected an object"),
    ],
)
def test_settings_that_cannot_be_read(settings: object, why: str, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=why):
        build_program(open_checkpoint(str(tmp_path)))


def damaged(tmp_path: Path, method: str, change: Callable[[Tensors], None]) -> None:
    quantised_model(method, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    load_weights(_core.reference_backend(), program, checkpoint)


MODULE = "model.layers.1.self_attn.o_proj."


@pytest.mark.parametrize(
    "method, part, value, why",
    [
        ("gptq-4", "scales", torch.ones(2, 64), r"o_proj\.scales has shape \(2, 64\), expected \(4, 64\)"),
        ("gptq-4", "g_idx", torch.full((64,), 4, dtype=torch.int32), r"o_proj\.g_idx names group 4 of 4"),
        ("gptq-4", "qzeros", torch.ones(4, 8), r"o_proj\.qzeros has the type fp32, expected int32"),
        ("awq", "qzeros", None, r"tensor .*o_proj\.qzeros is missing"),
        ("fp8-tensor", "weight_scale", None, r"o_proj\.weight is of type fp8_e4m3 and has no .*o_proj\.weight_scale"),
        ("fp8-block", "weight_scale_inv", torch.ones(3, 2), r"o_proj\.weight_scale_inv has shape \(3, 2\), expected \(2, 2\)"),
        ("ct-int4", "weight_scale", torch.ones(64, 5), r"o_proj has 64 columns in 5 groups"),
        ("ct-w8a8", "weight_scale", torch.ones(63, 1), r"o_proj\.weight_scale has shape \(63, 1\) for a weight of \(64, 64\)"),
    ],
)
def test_damaged_parts(method: str, part: str, value: torch.Tensor | None, why: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[MODULE + part]
        else:
            tensors[MODULE + part] = value

    with pytest.raises(ValueError, match=why):
        damaged(tmp_path, method, change)
