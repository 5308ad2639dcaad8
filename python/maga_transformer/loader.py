"""From a checkpoint to a backend's packed weights: read, make canonical, pack; several weights at a time."""

import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint, Source, stored_bytes
from maga_transformer.formats import Affine, Canonical, Dense, Float8, open_quantized, read_weight
from maga_transformer.formats.finite import not_finite
from maga_transformer.progress import Progress

log = logging.getLogger(__name__)

_GROUPS = (128, 64, 32)  # columns that share a scale, the first that fits
_MOST_BYTES = 4 << 30  # of weights that are on their way at once, unless one alone is larger


def load_weights(
    backend: _core.Backend,
    program: _core.Program,
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
    quantization: str = "",
    check: str = "off",
) -> list[_core.Weight]:
    """Packed weights in the order of program.weights. `progress` hears (bytes done, bytes in all) on this thread. Each of the
    `workers` threads (default: one a usable core) holds one unpacked weight, or one matrix of a stack, at a time, and all together
    at most _MOST_BYTES. What a finished weight was read from is given back, so that the process does not seem to hold the model
    twice. `quantization`: "int8", "int4" or "fp8" rounds the weights of linears that are stored unquantised, but not the
    vocabulary's and not those of routers; "" leaves them as they are. `check`: what becomes of weights that hold NaN or an
    infinity: "warn" logs their names, "refuse" raises ValueError with one."""
    checkpoint = open_quantized(checkpoint)
    specs = program.weights

    def read(part: Sequence[str]) -> Canonical:
        weight = read_weight(checkpoint, list(part))
        if check != "off" and (where := not_finite(weight)):
            told = f"{', '.join(part)}: {where} holds a value that is not finite"
            if check == "refuse":
                raise ValueError(f"{told} (CHECK_WEIGHTS=warn takes it)")
            log.warning("%s; outputs that meet it end with an error", told)
        return weight

    rounded = _linears(program) if quantization else set()
    sizes = [stored_bytes(checkpoint, sources) for _, sources, _ in specs]
    held = [max(size, math.prod(shape[-2:])) for size, (_, _, shape) in zip(sizes, specs, strict=True)]  # a byte a code
    total, done = sum(sizes), 0
    weights: list[_core.Weight | None] = [None] * len(specs)

    # Largest first, so that no thread is left alone with the vocabulary at the end.
    waiting = deque(sorted(range(len(specs)), key=lambda index: -sizes[index]))
    pending: dict[Future[_core.Weight], int] = {}
    under_way = 0
    with ThreadPoolExecutor(workers or usable_cores(), thread_name_prefix="load") as pool:
        while waiting or pending:
            while waiting and (not pending or under_way + held[waiting[0]] <= _MOST_BYTES):
                index = waiting.popleft()
                under_way += held[index]
                pending[pool.submit(_load, backend, read, *specs[index], quantization if index in rounded else "")] = index
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
                under_way -= held[index]
            if progress is not None:
                progress(done, total)
    return [weight for weight in weights if weight is not None]


def tell_of_widened(weights: Sequence[_core.Weight]) -> None:
    """One line, where the device has no kernels for some quantised weights and holds them as dense values."""
    reasons = Counter(weight.widened for weight in weights if weight.widened)
    if reasons:
        shown = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
        log.warning("%d quantised weights are held as dense values on this device (%s)", reasons.total(), shown)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _linears(program: _core.Program) -> set[int]:
    """Weights of linears and experts, without those whose results choose: tokens, or experts."""
    logits = {op["logits"][0] for op in program.ops if op["op"] == "moe"} | {program.logits}
    found: set[int] = set()
    for op in program.ops:
        if op["op"] in ("linear", "gated_linear") and op["out"][0] not in logits:
            found.add(op["weight"])
        elif op["op"] == "moe":
            found |= {op["gate_up"], op["down"]}
    return found - {op["table"] for op in program.ops if op["op"] == "embed"}


def _load(
    backend: _core.Backend,
    read_part: Callable[[Sequence[str]], Canonical],
    name: str,
    sources: list[str],
    shape: list[int],
    quantization: str,
) -> _core.Weight:
    def read(part: list[str]) -> Canonical:
        weight = read_part(part)
        return _quantized(weight, name, quantization) if quantization and isinstance(weight, Dense) else weight

    if len(shape) == 3:
        stack, each = backend.stack(name, shape), len(sources) // shape[0]
        for first in range(0, len(sources), each):
            weight = read(sources[first : first + each])
            if isinstance(weight, Dense):
                stack.add_dense(_plain(weight.values), weight.dtype)
            elif isinstance(weight, Float8):
                stack.add_float8(_plain(weight.codes), block=weight.block, scale=weight.scale)
            else:
                stack.add_affine(weight.codes, **_numbers(weight))
        return stack.finish()
    weight = read(sources)
    if isinstance(weight, Dense):
        return backend.pack_dense(name, shape, _plain(weight.values), weight.dtype)
    if isinstance(weight, Float8):
        return backend.pack_float8(name, shape, _plain(weight.codes), block=weight.block, scale=weight.scale)
    return backend.pack_affine(name, shape, weight.codes, **_numbers(weight))


def _quantized(weight: Dense, name: str, quantization: str) -> Canonical:
    """int8, fp8: a scale a row; int4: a scale a group of 128 columns, or of as many as divide them. A matrix that no group divides
    stays as it is."""
    columns = weight.values.shape[1]
    if quantization == "fp8":
        codes, scale = _core.quantize_fp8(_plain(weight.values), weight.dtype, name=name)
        return Float8(codes, (1, columns), scale)
    bits, group = (8, columns) if quantization == "int8" else (4, next((g for g in _GROUPS if columns % g == 0), 0))
    if group == 0 or columns % 16:
        log.warning("%s has %d columns: it is not quantised", name, columns)
        return weight
    codes, scale, zero = _core.quantize(_plain(weight.values), weight.dtype, bits=bits, group=group, name=name)
    return Affine(codes, bits, group, scale, None, zero)


def _numbers(weight: Affine) -> dict[str, Any]:
    return {"bits": weight.bits, "group": weight.group, "scale": weight.scale, "offset": weight.offset, "zero": weight.zero}


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Contiguous and aligned: files may place tensors at any byte."""
    return np.require(values, requirements=["C", "A"])
