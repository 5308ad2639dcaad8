"""Checkpoints that tests write: safetensors and GGUF files, tiny random models of transformers, the demo model as a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from maga_transformer.checkpoint import GgufCheckpoint
from maga_transformer.formats import read_weight
from maga_transformer.tokenizer.gguf import GgufVocabulary, build_tokenizer
from safetensors.numpy import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)  # models so small that a second thread costs more than it brings

MODELS: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def tiny_model(kind: str, folder: Path, *, seed: int = 0, **settings: Any) -> torch.nn.Module:
    """Saves a random model of transformers with visible weights, norms and biases; returns it, in fp32 with eager attention."""
    config_class, model_class = MODELS[kind]
    torch.manual_seed(seed)
    config = config_class(**{**TINY, **settings})
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25 if "embed" in name or "head" in name else parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


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


# K-quants: where a block keeps its fp16 scales (and that of the minimums), and values for them.
_K_SCALES = {
    "Q2_K": {80: 4e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "Q6_K": {208: 6.2e-5},
}
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
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
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(data, gguf_type)))
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
    return write_gguf(path, {**base_metadata, **metadata}, tensors, architecture=architecture)


def _blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values quantised; for K-quants, which gguf cannot make, random blocks of about the size of usual weights."""
    if kind.name not in _K_SCALES:
        return gguf.quants.quantize(values, kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for place, scale in _K_SCALES[kind.name].items():
        blocks[:, :, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def demo_folder(gguf_file: Path, folder: Path) -> Path:
    """The demo model as a Hugging Face folder in fp32: config.json, model.safetensors and the tokenizer's files."""
    checkpoint = GgufCheckpoint(str(gguf_file))
    tensors = {name: read_weight(checkpoint, [name]).dequantize() for name in checkpoint.names()}
    write_folder(folder, checkpoint.config, tensors)
    vocabulary = GgufVocabulary(str(gguf_file), checkpoint.metadata)
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    roles = {f"{ours}_token": vocabulary.tokens[vocabulary.id_of(theirs)] for ours, theirs in _ROLES.items()}
    template = checkpoint.metadata["tokenizer.chat_template"]
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary.id_of("eos")}))
    return folder
