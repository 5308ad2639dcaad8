"""PTUNING_PATH: what was tuned to stand before every prompt."""

from __future__ import annotations

from pathlib import Path

from maga_transformer.adapters import soft_prompt
from maga_transformer.adapters.peft import SETTINGS, Adapter
from maga_transformer.adapters.soft_prompt import SoftPrompt

_FOLDER = "ptuning"  # in the checkpoint's own


def find_ptuning(path: str, checkpoint_path: str) -> str:
    """`path`, or the folder `ptuning` in the checkpoint's where that exists; else ""."""
    beside = Path(checkpoint_path) / _FOLDER
    return path or (str(beside) if beside.is_dir() else "")


def open_ptuning(folder: str) -> SoftPrompt:
    """Raises FileNotFoundError for what is not there and ValueError for what cannot be used, naming the file."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not (Path(folder) / SETTINGS).is_file():
        raise ValueError(f"{folder}: no {SETTINGS} here, which PEFT saves beside what it tuned (P-Tuning v2 is not supported yet)")
    adapter = Adapter(folder)
    if adapter.kind not in soft_prompt.KINDS:
        raise adapter.error("peft_type", f"one of {', '.join(soft_prompt.KINDS)}")
    if adapter.settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise adapter.error("task_type", "CAUSAL_LM")
    if adapter.settings.get("num_transformer_submodules") not in (None, 1):
        raise adapter.error("num_transformer_submodules", "1")
    return SoftPrompt.read(adapter)
