"""Time of single ops on the CPU backend, beside what memory and arithmetic of this machine allow.

    python benchmarks/ops.py [--threads 2] [--isa avx2] [--exact] [--only linear]

Ops come from the cases of tests/ops, in sizes of real models. The limits are measured in the same run: bytes per second as the
best of streaming reads by all threads, FLOPs as fp32 matrix products in numpy. A share above 100 % means that the data stayed in
caches, or that int8 arithmetic is faster than fp32.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from maga_transformer import _core
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from ops import attention_cases, cases
from ops.case import Builder, Case
from ops.weights import Form

Q4 = Form("affine", 4, 32, True)
Q8 = Form("affine", 8, 32, False, 128)
BF16 = Form("bf16")
FP32 = Form("fp32")


def table() -> Iterator[tuple[str, Builder]]:
    for tokens in (1, 8, 32, 256):
        for form in (Q4, Q8, BF16, FP32):
            yield from cases.linear(form, 4096, 4096, tokens)
        yield from cases.linear(Q4, 576, 1536, tokens)
        yield from cases.gated_linear(Q4, 1536, 576, tokens, "silu")
    yield from cases.linear(Q8, 49152, 576, 1)
    attention_cases.SPANS |= {
        "prefill512": [(512, 0)],
        "chunk-at-2048": [(64, 1984)],
        "decode-at-1024": [(1, 1023)],
        "16-decodes-at-512": [(1, 511)] * 16,
    }
    for spans in ("prefill512", "chunk-at-2048", "decode-at-1024", "16-decodes-at-512"):
        yield from attention_cases.attention(64, 9, 3, spans, kv_dtype="fp16")
        for kv_dtype in ("fp16", "int8", "fp8_e4m3"):
            yield from attention_cases.attention(128, 32, 8, spans, kv_dtype=kv_dtype)
    for tokens in (1, 256):
        yield from cases.norm("rms", 4096, 4096, tokens)
        yield from cases.activation("silu", 11008, tokens)
        yield from cases.add(4096, tokens, False)
        yield from cases.embed(Q4, 4096, tokens, 1.0)
    yield from attention_cases.prepare_qkv(64, 9, 3, "prefill512", form=attention_cases.RopeForm(64))
    yield from attention_cases.prepare_qkv(128, 32, 8, "16-decodes-at-512", norms="qk", form=attention_cases.RopeForm(128))


def best_seconds(body: Callable[[], object], seconds: float) -> float:
    """The shortest of the calls that fit into `seconds`, at least three."""
    body()
    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        body()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def memory_bandwidth(threads: int) -> float:
    """Bytes per second of reading 512 MiB, each thread its part."""
    parts = np.array_split(np.ones(64 * 1024 * 1024, np.float64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return sum(part.nbytes for part in parts) / best_seconds(lambda: list(pool.map(np.max, parts)), 1.0)


def arithmetic_rate() -> float:
    """FLOPs per second of an fp32 matrix product."""
    n = 1024
    a, b = np.ones((n, n), np.float32), np.ones((n, n), np.float32)
    return 2 * n**3 / best_seconds(lambda: a @ b, 0.5)


def load(backend: _core.Backend, case: Case) -> tuple[_core.Executable, list[float]]:
    weights = [data.pack(backend, f"weight{i}") for i, data in enumerate(case.weights)]
    return backend.load(case.program, weights, **case.limits), [float(weight.bytes) for weight in weights]


def seconds_of(executable: _core.Executable, case: Case, budget: float) -> float:
    for run in case.runs:
        for value, data in run.inputs.items():
            executable.write_value(value, data)
        executable.run(**run.step)
    return best_seconds(lambda: executable.run(**case.runs[-1].step), budget)


def work(case: Case, weight_bytes: list[float]) -> tuple[float, float]:
    """FLOPs and bytes of the last step. Sequences of a step are alike in every case here."""
    step = case.runs[-1].step
    sequences = len(step["kv_length"])
    tokens = case.runs[-1].tokens // sequences
    costs = _core.cost(
        case.program,
        sequences=sequences,
        tokens_per_sequence=tokens,
        context=step["kv_length"][0] - tokens,
        logit_rows=len(step["logit_rows"]),
        kv_dtype=case.kv_dtype,
        weight_bytes=weight_bytes,
    )
    return sum(flops for flops, _, _ in costs), sum(weights + kv for _, weights, kv in costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: one per usable core")
    parser.add_argument("--isa", default="", help="the best of this machine by default")
    parser.add_argument("--exact", action="store_true", help="fp32 activations instead of int8 ones")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each case")
    args = parser.parse_args()

    backend = _core.cpu_backend(threads=args.threads, quantize_activations=not args.exact, isa=args.isa)
    console = Console(width=120)
    threads = int(backend.describe().split(", ")[2].split()[0])
    bandwidth, rate = memory_bandwidth(threads), arithmetic_rate()
    empty = cases.OpProgram(np.random.default_rng(0)).case([cases.Run(cases.plain_step(1, np.random.default_rng(0)))])
    idle = seconds_of(load(backend, empty)[0], empty, args.seconds)
    rows = []
    for name, build in table():
        if args.only not in name:
            continue
        case = build(np.random.default_rng(0))
        executable, weight_bytes = load(backend, case)
        seconds = max(seconds_of(executable, case, args.seconds) - idle, 1e-9)
        flops, moved = work(case, weight_bytes)
        rows.append((name, seconds, moved / seconds, flops / seconds))

    # Measured before and after: another process may have disturbed one of them.
    bandwidth, rate = max(bandwidth, memory_bandwidth(threads)), max(rate, arithmetic_rate())
    console.print(f"{backend.describe()}; {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOPs/s in fp32")
    console.print(f"a step without ops: {idle * 1e6:.1f} us, taken off every figure below")
    result = Table("op", "us", "GB/s", "of memory", "GFLOPs/s", "of fp32")
    for name, seconds, read, computed in rows:
        result.add_row(
            name,
            f"{seconds * 1e6:.1f}",
            f"{read / 1e9:.2f}",
            f"{read / bandwidth:.0%}",
            f"{computed / 1e9:.1f}",
            f"{computed / rate:.0%}",
        )
    console.print(result)


if __name__ == "__main__":
    main()
