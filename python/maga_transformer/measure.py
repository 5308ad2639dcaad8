"""What this machine's memory reaches, measured."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from maga_transformer.loader import usable_cores


def memory_bandwidth(mebibytes: int = 64) -> float:
    """Bytes a second that all cores read together, each from an array of its own of this size: numpy's maximum runs at the
    memory's speed and without the interpreter's lock."""
    cores = usable_cores()
    # Mapped, as freeing arrays of malloc's of this size would make it keep what is freed later (glibc's M_MMAP_THRESHOLD).
    parts = [np.frombuffer(mmap.mmap(-1, mebibytes << 20), np.int32) for _ in range(cores)]
    for part in parts:
        part[:] = 1  # pages exist only once they are written
    with ThreadPoolExecutor(cores) as pool:
        return best_rate(lambda: list(pool.map(np.max, parts)), sum(part.nbytes for part in parts))


def best_rate(work: Callable[[], object], amount: float) -> float:
    """amount / seconds of the fastest of a few runs."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return amount / best
