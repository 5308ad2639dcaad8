"""Where the time of one step goes, by kind of op: the profile behind the figures of benchmarks/engine.py.

    python benchmarks/step.py [MODEL] [--threads 2] [--batch 32] [--context 96] [--tokens 1] [--exact]

Each sequence brings `--tokens` tokens on top of `--context` ones (whose keys and values are whatever earlier steps left there).
"""

import argparse
import collections
import pathlib
import time

import numpy as np
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.demo import demo_model
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from rich.console import Console
from rich.table import Table

PAGE_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    checkpoint = open_checkpoint(str(args.model or demo_model()))
    program, _ = build_program(checkpoint)
    backend = _core.cpu_backend(threads=args.threads, quantize_activations=not args.exact, isa=args.isa)
    weights = load_weights(backend, program, checkpoint)
    length = args.context + args.tokens
    per_sequence = -(-length // PAGE_TOKENS)
    kv_dtype = "fp32" if args.exact else "fp16"
    model = backend.load(
        program,
        weights,
        tokens=args.batch * args.tokens,
        sequences=args.batch,
        logit_rows=args.batch,
        pages=args.batch * per_sequence,
        page_tokens=PAGE_TOKENS,
        kv_dtype=kv_dtype,
    )
    rng = np.random.default_rng(1)
    starts = list(range(0, args.batch * args.tokens + 1, args.tokens))
    step = {
        "positions": list(range(args.context, length)) * args.batch,
        "sequence_start": starts,
        "kv_length": [length] * args.batch,
        "page_start": list(range(0, args.batch * per_sequence + 1, per_sequence)),
        "pages": rng.permutation(args.batch * per_sequence).tolist(),
        "logit_rows": [s - 1 for s in starts[1:]],
    }

    def run() -> None:
        model.run(ids=rng.integers(0, program.vocab, args.batch * args.tokens).tolist(), **step)

    for _ in range(3):
        run()
    before, start = np.array(model.op_seconds), time.perf_counter()
    for _ in range(args.steps):
        run()
    seconds = (time.perf_counter() - start) / args.steps
    spent = (np.array(model.op_seconds) - before) / args.steps

    names = [spec[0] for spec in program.weights]
    kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    costs = _core.cost(
        model.program,
        sequences=args.batch,
        tokens_per_sequence=args.tokens,
        context=args.context,
        logit_rows=args.batch,
        kv_dtype=kv_dtype,
        weight_bytes=[w.bytes for w in weights],
    )
    for op, (flops, weight_bytes, kv_bytes), own in zip(model.program.ops, costs, spent, strict=True):
        label = op["op"]
        if "linear" in label:
            label += " " + names[op["weight"]].removesuffix(".weight").split(".")[-1]
        for i, value in enumerate((own, flops, weight_bytes + kv_bytes)):
            kinds[label][i] += value

    table = Table(title=f"{args.batch} sequences, {args.tokens} new tokens each on {args.context}: {seconds * 1e3:.2f} ms a step")
    for column in ("op", "ms", "share", "GFLOP/s", "GB/s"):
        table.add_column(column, justify="left" if column == "op" else "right")
    for label, (own, flops, moved) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        table.add_row(label, f"{own * 1e3:.3f}", f"{own / seconds:.1%}", f"{flops / own / 1e9:.0f}", f"{moved / own / 1e9:.1f}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{backend.describe()}; {args.batch * args.tokens / seconds:,.0f} tokens/s; outside the ops {1 - spent.sum() / seconds:.1%}"
    )


if __name__ == "__main__":
    main()
