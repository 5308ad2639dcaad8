"""What computes: the choice of a backend, and the arithmetic that a GPU uses for a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from maga_transformer import _core

_OLDEST, _FIRST_WITH_BF16 = 75, 80  # compute capabilities


@dataclass(frozen=True)
class Device:
    kind: str  # cpu or cuda
    index: int = 0
    card: _core.CudaDevice | None = None

    @property
    def defaults(self) -> str:
        """Its key in DEVICE_DEFAULTS."""
        return "cuda from 64 GiB" if self.card and self.card.total_bytes >= 64 << 30 else self.kind


def find_device(wanted: str) -> Device:
    """`wanted`: auto (the first card that is new enough, else the CPU), cpu, cuda, or cuda:N. ValueError says why a card that
    was asked for cannot be used."""
    if wanted == "cpu":
        return Device("cpu")
    cards, why = _core.cuda_devices()
    if wanted == "auto":
        index = next((i for i, card in enumerate(cards) if card.capability >= _OLDEST), None)
        return Device("cpu") if index is None else Device("cuda", index, cards[index])
    if not cards:
        raise ValueError(why)
    index = int(wanted.partition(":")[2] or 0)
    if index >= len(cards):
        raise ValueError(f"this machine has {len(cards)} usable cards; valid: cuda:0 to cuda:{len(cards) - 1}")
    return Device("cuda", index, cards[index])


def compute_dtype(wanted: str, stored: str, capability: int) -> str:
    """bf16, fp16 or fp32. `stored`: the dtype of the checkpoint's weights. `wanted` auto: the stored one where it is a half type
    (a card without bf16 takes fp16), bf16 for the others."""
    if wanted == "auto":
        has_bf16 = capability >= _FIRST_WITH_BF16
        return "fp16" if stored == "fp16" or not has_bf16 else "bf16"
    if wanted == "bf16" and capability < _FIRST_WITH_BF16:
        raise ValueError(f"this card (compute capability {capability / 10:.1f}) has no bf16; valid: auto, fp16, fp32")
    return wanted


def cuda_backend(device: Device, compute: str, memory_utilization: float = 0.9) -> _core.Backend:
    return _core.cuda_backend(device.index, compute, memory_utilization, library_folders())


def library_folders() -> list[str]:
    """Where NVIDIA's Python packages keep cuBLASLt and NCCL: nvidia/cublas/lib, nvidia/cu13/lib, ... beside other packages."""
    folders = [place for entry in sys.path for place in sorted(Path(entry or ".").glob("nvidia/*/lib")) if place.is_dir()]
    return [str(place.resolve()) for place in folders]
