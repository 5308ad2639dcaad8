"""Tiny random models that embed or score, and the folders that sentence-transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from folders import TINY

_RNG = np.random.default_rng(5)
TEXTS = [_RNG.integers(3, 96, n).tolist() for n in (1, 40, 17, 33)]
_ENCODER = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-relu": ("Bert", {"hidden_act": "relu", "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}),
    "nomic-bert": ("NomicBert", {"max_position_embeddings": 64, "layer_norm_eps": 1e-5}),
    "nomic-bert-dynamic": (
        "NomicBert",
        {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "llama": ("Llama", {"num_key_value_heads": 2}),
}
SCORERS = [kind for kind in KINDS if not kind.startswith("nomic-bert")]  # which is published for embeddings alone


def tiny(kind: str, suffix: str, folder: Path, **settings: Any) -> Any:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**{**_ENCODER, "pad_token_id": 0, **own, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, name + suffix)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.5)
    model.save_pretrained(folder)
    return model


def sentence_transformer(folder: Path, pooling: str, *, normalize: bool = False) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    if normalize:
        modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens", "pooling_mode_lasttoken")
    (folder / "1_Pooling/config.json").write_text(json.dumps({mode: mode == pooling for mode in modes}))


def pooled(model: Any, pooling: str) -> np.ndarray:
    """What transformers makes of TEXTS, each by itself."""
    vectors = []
    for ids in TEXTS:
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        vectors.append(hidden[0] if "cls" in pooling else hidden[-1] if "last" in pooling else hidden.mean(0))
    return np.stack(vectors)


def scored(model: Any) -> np.ndarray:
    with torch.no_grad():
        return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in TEXTS])
