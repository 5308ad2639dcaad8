"""PTUNING_PATH: what was tuned to stand before every prompt."""

from __future__ import annotations

from pathlib import Path

from maga_transformer.adapters import kv_prefix, soft_prompt
from maga_transformer.adapters.kv_prefix import KvPrefix
from maga_transformer.adapters.peft import SETTINGS, Adapter
from maga_transformer.adapters.soft_prompt import SoftPrompt

Tuned = SoftPrompt | KvPrefix

_FOLDER = "ptuning"  # in the checkpoint's own


def find_ptuning(path: str, checkpoint_path: str) -> str:
    """`path`, or the folder `ptuning` in the checkpoint's where that exists; else ""."""
    beside = Path(checkpoint_path) / _FOLDER
    return path or (str(beside) if beside.is_dir() else "")


def open_ptuning(folder: str) -> Tuned:
    """Raises FileNotFoundError for what is not there and ValueError for what cannot be used, naming the file."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not (Path(folder) / SETTINGS).is_file():
        prefix = KvPrefix.read_encoder(folder)
        if prefix is None:
            raise ValueError(f"{folder}: neither PEFT's {SETTINGS} nor a pytorch_model.bin of P-Tuning v2 is here")
        return prefix
    adapter = Adapter(folder)
    if adapter.kind not in (*soft_prompt.KINDS, *kv_prefix.KINDS):
        raise adapter.error("peft_type", f"one of {', '.join((*soft_prompt.KINDS, *kv_prefix.KINDS))}")
    if adapter.settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise adapter.error("task_type", "CAUSAL_LM")
    if adapter.settings.get("num_transformer_submodules") not in (None, 1):
        raise adapter.error("num_transformer_submodules", "1")
    return KvPrefix.read(adapter) if adapter.kind in kv_prefix.KINDS else SoftPrompt.read(adapter)
