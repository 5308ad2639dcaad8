"""Readers: every checkpoint, whatever its files, is names, shapes, dtypes and lazily mapped tensors."""

from pathlib import Path

from maga_transformer.checkpoint.dummy import DummyCheckpoint
from maga_transformer.checkpoint.gguf import GgufCheckpoint
from maga_transformer.checkpoint.heads import with_heads
from maga_transformer.checkpoint.hub import local_copy
from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.checkpoint.megatron import open_megatron
from maga_transformer.checkpoint.megatron_files import find_megatron
from maga_transformer.checkpoint.meta import is_meta_folder, open_meta
from maga_transformer.checkpoint.prefixed import PrefixedCheckpoint
from maga_transformer.checkpoint.safetensors import SafetensorsCheckpoint
from maga_transformer.checkpoint.source import Source, stored_bytes
from maga_transformer.checkpoint.torch_folder import INDEX, TorchCheckpoint, torch_files

__all__ = [
    "Checkpoint",
    "DummyCheckpoint",
    "GgufCheckpoint",
    "SafetensorsCheckpoint",
    "Source",
    "TorchCheckpoint",
    "open_checkpoint",
    "stored_bytes",
]

_PARTS = (".safetensors", ".bin", ".pt", ".pth")


def open_checkpoint(path: str, load_format: str = "auto") -> Checkpoint:
    """Opens a folder of Hugging Face (safetensors, .bin, .pth, .pt), Meta (params.json) or Megatron-LM, a GGUF file, or a folder
    that holds exactly one GGUF model; or a model of the hub by its name, from the hub's cache or fetched into it.
    `load_format` "dummy": a folder with config.json, or such a file, gets random weights.

    Raises FileNotFoundError for what is not there and ValueError for what cannot be read, naming the file.
    """
    place = Path(path)
    if not place.exists():
        place = local_copy(path)
        path = str(place)
    if load_format == "dummy":
        return DummyCheckpoint(path)
    if place.is_file():
        if place.suffix in _PARTS:
            raise ValueError(f"{path}: give the folder that holds this file and its config.json")
        return GgufCheckpoint(str(place))
    has_config = (place / "config.json").is_file()
    if is_meta_folder(place) and not has_config:
        return open_meta(str(place))
    if any(place.glob("*.safetensors")) or (place / "model.safetensors.index.json").exists():
        found = SafetensorsCheckpoint(str(place))
        # The decoder alone, as models that embed are saved: without the name that it has in a language model.
        return PrefixedCheckpoint(found, "model.") if "embed_tokens.weight" in found.names() else with_heads(found)
    gguf = [file for file in sorted(place.glob("*.gguf")) if not _is_later_split(file.name)]
    if len(gguf) == 1:
        return GgufCheckpoint(str(gguf[0]))
    if gguf:
        raise ValueError(f"{path}: holds {len(gguf)} GGUF models, give one of them: {', '.join(file.name for file in gguf)}")
    if (place / INDEX).exists() or torch_files(str(place)):
        return with_heads(TorchCheckpoint(str(place)))
    megatron = find_megatron(place)
    if megatron is not None:
        return open_megatron(str(place), megatron)
    raise FileNotFoundError(f"{path}: no weights here (looked for *.safetensors, *.gguf, *.bin, *.pth, *.pt and mp_rank_* folders)")


def _is_later_split(name: str) -> bool:
    """model-00002-of-00003.gguf: reached through the first file."""
    parts = name.removesuffix(".gguf").split("-")
    return len(parts) > 3 and parts[-2] == "of" and parts[-3].isdigit() and int(parts[-3]) > 1
