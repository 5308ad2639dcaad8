"""Hugging Face folders that tests write: tiny random models of transformers, and the demo model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from maga_transformer.checkpoint import GgufCheckpoint
from maga_transformer.formats import read_weight
from maga_transformer.tokenizer.gguf import GgufVocabulary, build_tokenizer
from safetensors.numpy import save_file

torch.set_num_threads(1)  # models so small that a second thread costs more than it brings

# kind -> transformers' name, before Config and ForCausalLM
MODELS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "gemma": "Gemma",
    "gpt_neox": "GPTNeoX",
    "phi": "Phi",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "falcon": "Falcon",
    "bloom": "Bloom",
    "mpt": "Mpt",
    "olmo2": "Olmo2",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "gemma3": "Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "gemma2": "Gemma2",
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "opt": "OPT",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
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


def class_names(kind: str) -> tuple[str, str]:
    name = MODELS[kind]
    model = "GPT2LMHeadModel" if kind == "gpt2" else f"{name}ForCausalLM"
    return ("Gemma3TextConfig" if kind == "gemma3" else f"{name}Config"), model


def tiny_model(kind: str, folder: Path, *, seed: int = 0, **settings: Any) -> torch.nn.Module:
    """Saves a random model of transformers with visible weights, norms and biases; returns it, in fp32."""
    config_class, model_class = (getattr(transformers, name) for name in class_names(kind))
    torch.manual_seed(seed)
    known = config_class()
    tiny = {key: value for key, value in TINY.items() if hasattr(known, key)}
    config = config_class(**{**tiny, **settings})
    config._attn_implementation = "sdpa" if kind == "falcon" else "eager"  # Falcon's eager code adds ALiBi twice
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.25 if "embed" in name or "head" in name else parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
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


_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


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
