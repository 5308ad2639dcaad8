"""GGUF files that tests write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

TOKENIZER: dict[str, Any] = {  # of 96 tokens
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(96)],
    "tokenizer.ggml.scores": [-float(i) for i in range(96)],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.eos_token_id": 3,
}


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    *,
    architecture: str = "llama",
    alignment: int = 32,
) -> Path:
    """`tensors`: stored data, as uint8 (rows, bytes) for block formats, and its type."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Types that gguf cannot make: where a block keeps its fp16 scales (and that of the minimums), and values for them that give weights
# of about the usual size.
_SCALES: dict[str, dict[int, float]] = {
    "Q2_K": {80: 4e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "Q6_K": {208: 6.2e-5},
    "IQ1_S": {0: 8e-3},
    "IQ2_XXS": {0: 1e-3},
    "IQ2_XS": {0: 1e-3},
    "IQ2_S": {0: 1e-3},
    "IQ3_XXS": {0: 4e-4},
    "IQ3_S": {0: 4e-4},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 6e-5},
    "Q1_0": {0: 6e-2},
    "IQ1_M": {},
    "NVFP4": {},
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_from_model(
    model: torch.nn.Module,
    path: Path,
    quantize: Callable[[str], gguf.GGMLQuantizationType | None] | None = None,
    *,
    architecture: str | None = None,
    tables: dict[str, np.ndarray] | None = None,
    alignment: int = 32,
    **metadata: Any,
) -> Path:
    """Writes a model of transformers as llama.cpp's converter does. `quantize(name)`: the gguf type of a matrix, None keeps fp32.
    The model's own weights become those that the file holds."""
    config = model.config
    architecture = architecture or config.model_type
    tensors = {name: (table, gguf.GGMLQuantizationType.F32) for name, table in (tables or {}).items()}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, kind = name.rpartition(".")
        if base.startswith("model.layers."):
            _, _, layer, module = base.split(".", 3)
            stored = f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"
        else:
            stored = f"{_GGUF_NAMES[base]}.{kind}"
        kind_wanted = quantize(stored) if quantize is not None and parameter.ndim == 2 else None
        if kind_wanted is None:
            gguf_type, data = gguf.GGMLQuantizationType.F32, parameter.numpy()
        else:
            gguf_type, data = kind_wanted, _blocks(parameter.numpy(), kind_wanted)
            parameter.copy_(torch.from_numpy(dequantize(data, gguf_type)))
        if architecture == "llama" and ("attn_q." in stored or "attn_k." in stored):
            heads = config.num_attention_heads if "attn_q." in stored else config.num_key_value_heads
            rows = data.shape[0] // heads
            data = data.reshape(heads, 2, rows // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        tensors[stored] = (np.ascontiguousarray(data), gguf_type)
    base_metadata = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return write_gguf(path, {**base_metadata, **metadata}, tensors, architecture=architecture, alignment=alignment)


def dequantize(blocks: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """gguf's own, and Q1_0, which it lacks."""
    if kind.name != "Q1_0":
        return gguf.quants.dequantize(blocks, kind)
    runs = blocks.reshape(-1, 18)
    scale = runs[:, :2].copy().view(np.float16).astype(np.float32)
    values = np.where(np.unpackbits(runs[:, 2:], axis=1, bitorder="little"), scale, -scale)
    return values.reshape(*blocks.shape[:-1], -1)


def _blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values quantised; for types that gguf cannot make, random blocks."""
    if kind.name not in _SCALES:
        return gguf.quants.quantize(values, kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for place, scale in _SCALES[kind.name].items():
        blocks[:, :, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    if kind.name == "IQ1_M":  # the scale lies in the upper halves of four bytes
        bits = int(np.float16(8e-3).view(np.uint16))
        for i in range(4):
            blocks[:, :, 49 + 2 * i] = blocks[:, :, 49 + 2 * i] & 15 | (bits >> (4 * i) & 15) << 4
    elif kind.name == "NVFP4":
        blocks[:, :, :4] = random.integers(4, 16, (rows, columns // elements, 4))
    return blocks.reshape(rows, -1)
