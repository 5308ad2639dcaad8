"""What a model is served for: to generate, to embed prompts, or to score them; read from the files beside its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maga_transformer.checkpoint import Checkpoint
from maga_transformer.checkpoint.heads import HEADS

GENERATE, EMBED, SCORE = "generate", "embed", "score"
COLBERT, SPARSE = HEADS  # of bge-m3: a vector and a weight for every token
# sentence-transformers' names of a pooling -> the op's.
_POOLINGS = {
    "cls": "first",
    "pooling_mode_cls_token": "first",
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
}


@dataclass(frozen=True)
class Task:
    """`pooling`: which tokens an embedding is made of (first, last, mean); `normalize`: it is scaled to length 1."""

    kind: str
    pooling: str = ""
    normalize: bool = False
    labels: int = 0  # of a scoring model
    max_tokens: int = 0  # of an input, where the files limit it; 0: they do not
    multi_vector: bool = False  # beside an embedding, a vector and a weight for every token (https://arxiv.org/abs/2402.03216)


def read_task(checkpoint: Checkpoint, wanted: str, *, encoder: bool) -> Task:
    """`wanted`: auto, generate, embed or score. `encoder`: the family has no head that generates. ValueError names the file or
    setting that asks for what cannot be had."""
    listed = checkpoint.config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    scores = architecture.endswith("ForSequenceClassification")
    folder = Path(checkpoint.path)
    modules = folder / "modules.json"
    every_head = wanted == "auto" and encoder and all(f"{head}.weight" in checkpoint.names() for head in HEADS)
    if wanted == "auto":
        wanted = SCORE if scores else EMBED if encoder or modules.is_file() else GENERATE
    if wanted == GENERATE and (encoder or scores):
        raise ValueError(f"{checkpoint.path}: {architecture or 'this model'} does not generate text; valid: TASK=embed or score")
    if wanted == SCORE:
        if not scores:
            raise ValueError(
                f"{checkpoint.path}: {architecture} has no head for scores; valid: a ...ForSequenceClassification model"
            )
        return Task(SCORE, labels=_labels(checkpoint.config))
    if wanted == EMBED:
        if scores:
            raise ValueError(f"{checkpoint.path}: {architecture} gives scores, not embeddings; valid: TASK=score")
        if modules.is_file():
            task = _sentence_transformer(folder, modules)
        else:
            usual = "cls" if every_head else "mean" if encoder else "lasttoken"
            task = Task(EMBED, pooling=_POOLINGS[checkpoint.config.get("gguf_pooling", usual)], normalize=True)
        if every_head and task.pooling != "first":
            raise ValueError(f"{checkpoint.path}: {', '.join(HEADS)} go with embeddings of the first token; valid: TASK=embed")
        return replace(task, multi_vector=every_head)
    return Task(GENERATE)


def _labels(config: dict[str, Any]) -> int:
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    count = config.get("num_labels")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 2


def _sentence_transformer(folder: Path, file: Path) -> Task:
    """modules.json lists a transformer, a pooling, and perhaps a normalisation, each with a folder of its own."""
    listed = _read(file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ValueError(f"{file}: expected a list of modules")
    pooling, normalize = "", False
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(f"{file}: module {kind!r} is not supported (supported: Transformer, Pooling, Normalize)")
    limits = folder / "sentence_bert_config.json"
    limit = _read(limits).get("max_seq_length") if limits.is_file() else None
    return Task(EMBED, pooling or "mean", normalize, max_tokens=limit if isinstance(limit, int) and limit > 0 else 0)


def _pooling(file: Path) -> str:
    config = _read(file)
    mode = config.get("pooling_mode")
    chosen = (
        [mode] if isinstance(mode, str) else [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    )
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ValueError(f"{file}: pooling {', '.join(chosen) or 'none'} is not supported (supported: cls, lasttoken, mean)")
    return _POOLINGS[chosen[0]]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
