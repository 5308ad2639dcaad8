"""From a checkpoint to a backend's packed weights: read, make canonical, pack; several weights at a time."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint, Source, stored_bytes
from maga_transformer.formats import Dense, read_weight

Progress = Callable[[int, int], None]

_MOST_BYTES = 4 << 30  # of stored weights that are on their way at once, unless one alone is larger


def load_weights(
    backend: _core.Backend,
    program: _core.Program,
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
) -> list[_core.Weight]:
    """Packed weights in the order of program.weights. `progress` hears (bytes done, bytes in all) on this thread. Each of the
    `workers` threads (default: one a usable core) holds one unpacked weight at a time, and all together at most _MOST_BYTES.
    What a finished weight was read from is given back, so that the process does not seem to hold the model twice."""
    specs = program.weights
    sizes = [stored_bytes(checkpoint, sources) for _, sources, _ in specs]
    total, done = sum(sizes), 0
    weights: list[_core.Weight | None] = [None] * len(specs)

    # Largest first, so that no thread is left alone with the vocabulary at the end.
    waiting = deque(sorted(range(len(specs)), key=lambda index: -sizes[index]))
    pending: dict[Future[_core.Weight], int] = {}
    under_way = 0
    with ThreadPoolExecutor(workers or usable_cores(), thread_name_prefix="load") as pool:
        while waiting or pending:
            while waiting and (not pending or under_way + sizes[waiting[0]] <= _MOST_BYTES):
                index = waiting.popleft()
                under_way += sizes[index]
                pending[pool.submit(_load, backend, checkpoint, *specs[index])] = index
            finished, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                index = pending.pop(future)
                try:
                    weights[index] = future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                for name in {Source.parse(source).tensor for source in specs[index][1]}:
                    checkpoint.release(name)
                done += sizes[index]
                under_way -= sizes[index]
            if progress is not None:
                progress(done, total)
    return [weight for weight in weights if weight is not None]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load(backend: _core.Backend, checkpoint: Checkpoint, name: str, sources: list[str], shape: list[int]) -> _core.Weight:
    weight = read_weight(checkpoint, sources)
    if isinstance(weight, Dense):
        return backend.pack_dense(name, shape, _plain(weight.values), weight.dtype)
    return backend.pack_affine(
        name, shape, weight.codes, bits=weight.bits, group=weight.group, scale=weight.scale, offset=weight.offset, zero=weight.zero
    )


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Contiguous and aligned: files may place tensors at any byte."""
    return np.require(values, requirements=["C", "A"])
