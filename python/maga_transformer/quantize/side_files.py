"""What a checkpoint has beside its weights: config.json, the tokenizer, the chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from maga_transformer.checkpoint import Checkpoint
from maga_transformer.tokenizer import Tokenizer

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def is_hugging_face(checkpoint: Checkpoint) -> bool:
    return (Path(checkpoint.path) / "config.json").is_file()


def float_type(checkpoint: Checkpoint) -> str:
    """The type that a model gets which does not come as Hugging Face's folder; "": each tensor keeps its own."""
    if is_hugging_face(checkpoint):
        return ""
    stored = {checkpoint.dtype(name) for name in checkpoint.names()}
    return "bf16" if "bf16" in stored else "fp16"


def config(checkpoint: Checkpoint, quantization: dict[str, Any]) -> dict[str, Any]:
    found = dict(checkpoint.config)
    kind = float_type(checkpoint)
    if kind:
        found["torch_dtype"] = _TORCH_NAMES[kind]
    return {**found, "quantization_config": quantization}


def write(checkpoint: Checkpoint, words: Tokenizer | None, folder: Path) -> None:
    """Copies them, or writes what the checkpoint's own files say. `words`: its tokenizer, where it is not Hugging Face's."""
    if not is_hugging_face(checkpoint):
        assert words is not None
        words.save(folder)
        return
    for file in sorted(Path(checkpoint.path).iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
