"""Folders as PEFT saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_prompt(folder: Path, embeddings: torch.Tensor, *, safetensors: bool = True, **settings: Any) -> Path:
    """A tuned prompt. `settings` None: the key is absent."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "num_virtual_tokens": embeddings.shape[0],
        "token_dim": embeddings.shape[1],
        "num_transformer_submodules": 1,
    }
    kept = {key: value for key, value in {**known, **settings}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    tensors = {"prompt_embeddings": embeddings.contiguous()}
    if safetensors:
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        torch.save(tensors, folder / "adapter_model.bin")
    return folder
