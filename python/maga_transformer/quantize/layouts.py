"""How each format stores a quantised linear, and the quantization_config that says so. The readers are in formats/."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer import __version__
from maga_transformer.checkpoint.safetensors_writer import Stored
from maga_transformer.formats.canonical import rounded, widened
from maga_transformer.quantize.float8 import LARGEST, to_e4m3
from maga_transformer.quantize.grid import Floats, Quantized
from maga_transformer.quantize.recipe import Recipe

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight rows each nibble of a word holds


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """(rows, count) -> (rows, words): the lowest bits first; codes may straddle words. The inverse of formats.quantized.unpack."""
    rows, count = codes.shape
    if bits == 8:
        stream = codes
    elif 8 % bits == 0:
        parts = codes.reshape(rows, -1, 8 // bits) << (bits * np.arange(8 // bits, dtype=np.uint8))
        stream = np.bitwise_or.reduce(parts, axis=2)
    else:
        ones = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
        stream = np.packbits(ones.reshape(rows, count * bits), axis=1, bitorder="little")
    return np.ascontiguousarray(stream).view(np.int32)


def gptq(module: str, q: Quantized, recipe: Recipe) -> dict[str, Stored]:
    stored = q.zero - np.uint8(recipe.checkpoint_format == "gptq") & np.uint8((1 << recipe.bits) - 1)
    return {
        f"{module}.qweight": ("int32", pack(q.codes, recipe.bits).T),
        f"{module}.qzeros": ("int32", pack(np.ascontiguousarray(stored.T), recipe.bits)),
        f"{module}.scales": ("fp16", q.scale.T.astype(np.float16)),
        f"{module}.g_idx": ("int32", q.group_of),
    }


def awq(module: str, q: Quantized) -> dict[str, Stored]:
    def words(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        columns = np.ascontiguousarray(codes.T)
        return pack(columns.reshape(len(columns), -1, 8)[:, :, _AWQ_ORDER].reshape(columns.shape), 4)

    return {
        f"{module}.qweight": ("int32", words(q.codes)),
        f"{module}.qzeros": ("int32", words(q.zero)),
        f"{module}.scales": ("fp16", q.scale.T.astype(np.float16)),
    }


def int8(module: str, weight: Floats, dtype: str) -> dict[str, Stored]:
    """A scale a row, of the model's type, by which the row is then divided."""
    bits, scale = _scale(np.abs(weight).max(axis=1) / 127, dtype)
    codes = np.clip(np.rint(weight / scale[:, None]), -127, 127) + 128
    return {
        f"{module}.weight_packed": ("int32", pack(codes.astype(np.uint8), 8)),
        f"{module}.weight_scale": (dtype, bits[:, None]),
        f"{module}.weight_shape": ("int64", np.asarray(weight.shape, np.int64)),
    }


def fp8(module: str, weight: Floats, dtype: str) -> dict[str, Stored]:
    bits, scale = _scale(np.abs(weight).max(axis=1) / LARGEST, dtype)
    return {
        f"{module}.weight": ("fp8_e4m3", to_e4m3(weight / scale[:, None])),
        f"{module}.weight_scale": (dtype, bits[:, None]),
    }


def _scale(scale: Floats, dtype: str) -> tuple[npt.NDArray[Any], Floats]:
    """As stored, and its values; of rows of zeros, 1."""
    bits = rounded(np.where(scale > 0, scale, 1).astype(np.float32), dtype)
    values = widened(bits, dtype)
    if not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"a row's scale does not fit {dtype}")
    return bits, values


def quantization_config(recipe: Recipe, unquantized: list[str]) -> dict[str, Any]:
    """`unquantized`: modules that stay as they are."""
    if recipe.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": recipe.act_order == "dynamic",
            "static_groups": recipe.act_order == "static",
            "true_sequential": True,
            "damp_percent": recipe.damp,
            "lm_head": False,
            "checkpoint_format": recipe.checkpoint_format,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"maga_transformer:{__version__}"]},
        }
    if recipe.method == "awq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    number = {"num_bits": 8, "symmetric": True, "group_size": None}
    kind = "int" if recipe.method == "int8" else "float"
    activations = {**number, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if recipe.method == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "type": kind, "strategy": "channel", "dynamic": False},
                "input_activations": activations if recipe.method == "fp8" else None,
                "output_activations": None,
            }
        },
        "ignore": unquantized,
        "kv_cache_scheme": None,
    }
