"""Speed of the engine on a GPU with random weights of a known shape, each figure beside the card's limit and vLLM's recorded one.

    python benchmarks/gpu.py [--shape llama-3-8b] [--decode 1,8,64,256] [--prefill 1x1024,1x8192,8x2048]
                             [--requests 1000 --in 512 --out 256] [--quantization fp8] [--step-profile]

Everything goes through the whole engine (submit, schedule, run, choose, poll), greedy, without end-of-text tokens, prefix cache
off. Prompts are random ids, new ones every round; the median round counts. Needs numpy only.
"""

import argparse
import itertools
import pathlib
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpu_recorded as recorded
import numpy as np
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.device import compute_dtype, cuda_backend, find_device
from maga_transformer.kv_cache import KV_DTYPES
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

SHAPES = pathlib.Path(__file__).parent / "shapes"
# Bytes, and bf16 and fp8 operations, a second that one H200 reaches (measured: reads, cuBLASLt).
BANDWIDTH, FLOPS, FP8_FLOPS = 4.51e12, 750e12, 1384e12
DECODE_CONTEXT, DECODE_STEPS = 128, 256


@dataclass
class Times:
    whole: float  # seconds
    decode: float  # from the moment when every sequence has its first token


class Model:
    """A loaded shape and its engine, driven as the server drives it: submit, wait for the event descriptor, poll."""

    def __init__(self, args: argparse.Namespace) -> None:
        marks = [("", time.perf_counter())]

        def mark(part: str) -> None:
            marks.append((part, time.perf_counter()))

        path = SHAPES / f"{args.shape}.json"
        checkpoint = open_checkpoint(str(path if path.is_file() else args.shape), args.load_format)
        checkpoint.config["max_position_embeddings"] = max(checkpoint.config["max_position_embeddings"], args.longest)
        self.program, family = build_program(checkpoint)
        device = find_device(args.device)
        if device.card:
            self.kv_dtype = compute_dtype(args.dtype, checkpoint.dtype(family.embedding), device.card.capability)
            backend = cuda_backend(device, self.kv_dtype, args.gpu_memory_utilization)
        else:
            backend, self.kv_dtype = _core.cpu_backend(), "fp16"
        if args.kv_cache_dtype != "auto":
            self.kv_dtype = args.kv_cache_dtype
        mark("backend")
        weights = load_weights(backend, self.program, checkpoint, quantization=args.quantization)
        self.weight_bytes = [weight.bytes for weight in weights]
        mark("weights")
        model = backend.load(
            self.program,
            weights,
            tokens=args.token_budget,
            sequences=args.max_num_seqs,
            logit_rows=args.max_num_seqs,
            pages=args.pages,
            page_tokens=args.block_size,
            kv_dtype=self.kv_dtype,
        )
        mark("buffers, pages, graphs")
        self.held = held = model.limits.pages * args.block_size
        self.fused = model.program
        in_fp8 = args.quantization == "fp8"
        self.flops = [FP8_FLOPS if in_fp8 and self.rounded(op) else FLOPS for op in self.fused.ops]
        weights_gib, buffers_gib = sum(self.weight_bytes) / 2**30, model.buffer_bytes / 2**30
        self.about = (
            f"{backend.describe()}; weights {weights_gib:.2f} GiB, buffers {buffers_gib:.2f} GiB, "
            f"K/V of {self.kv_dtype} for {held:,} tokens"
        )
        self.engine = _core.Engine(
            backend,
            model,
            max_sequences=args.max_num_seqs,
            token_budget=args.token_budget,
            max_queue=1 << 20,
            max_sequence_length=min(self.program.max_positions, held),
            prefix_cache=False,
            bytes_per_second=BANDWIDTH,
            flops_per_second=FLOPS,
            weight_bytes=self.weight_bytes,
        )
        mark("engine")
        parts = [f"{part} {end - begin:.1f}" for (_, begin), (part, end) in itertools.pairwise(marks)]
        self.started = f"{marks[-1][1] - marks[0][1]:.1f} s from nothing to ready ({', '.join(parts)})"
        self.random = np.random.default_rng(1)

    def rounded(self, op: dict[str, Any]) -> bool:
        """Whether --quantization rounds the op's weight."""
        return op["op"] == "gated_linear" or (op["op"] == "linear" and op["out"][0] != self.fused.logits)

    def generate(self, requests: int, tokens_in: int, tokens_out: int) -> Times:
        """`requests` prompts, submitted at once."""
        params = _core.SamplingParams(max_new_tokens=tokens_out, temperature=0.0)
        prompts = self.random.integers(0, self.program.vocab, (requests, tokens_in), np.int32)
        start = all_begun = time.perf_counter()
        running = {self.engine.submit(prompt, params) for prompt in prompts}
        silent = set(running)
        while running:
            select.select([self.engine.event_fd()], [], [])
            for event in self.engine.poll():
                silent.discard(event.request)
                if event.finish:
                    if event.finish != "length":
                        raise RuntimeError(event.error or event.finish)
                    running.discard(event.request)
            if silent:
                all_begun = time.perf_counter()
        end = time.perf_counter()
        return Times(end - start, end - all_begun)

    def floor(self, sequences: int, tokens: int, context: int) -> float:
        """The least seconds of a step: each op at the card's bandwidth or at its arithmetic, whichever is slower."""
        costs = _core.cost(
            self.fused,
            sequences=sequences,
            tokens_per_sequence=tokens,
            context=context,
            logit_rows=sequences,
            kv_dtype=self.kv_dtype,
            weight_bytes=self.weight_bytes,
        )
        return sum(
            max(flops / rate, (weights + kv) / BANDWIDTH) for rate, (flops, weights, kv) in zip(self.flops, costs, strict=True)
        )


@dataclass
class Figure:
    label: str
    speed: float  # tokens/s
    best: float  # tokens/s at the card's limit
    step: float  # seconds
    vllm: float | None

    def cells(self) -> list[str]:
        beside = [f"{self.vllm:,.0f}", f"{self.speed / self.vllm:.2f}"] if self.vllm else ["-", "-"]
        ours = [f"{self.speed:,.0f}", f"{self.step * 1e3:.2f}", f"{self.best:,.0f}", f"{self.speed / self.best:.0%}"]
        return [self.label, *ours, *beside]


def median(rounds: int, measure: Callable[[], float]) -> float:
    measure()  # warm
    return statistics.median(measure() for _ in range(rounds))


def decode(model: Model, batch: int, args: argparse.Namespace, known: recorded.Figures) -> tuple[Figure, str]:
    """All tokens after the first: the time of one-token outputs is taken off. Also where a step's time went."""
    first = median(args.rounds, lambda: model.generate(batch, args.context, 1).whole)
    before = model.engine.stats()
    seconds = median(args.rounds, lambda: model.generate(batch, args.context, DECODE_STEPS + 1).whole) - first
    after = model.engine.stats()
    steps = after["steps"] - before["steps"]

    def spent(part: str) -> float:
        """Milliseconds a step; those of the prompts' steps are among them."""
        return (after[part + "_seconds"] - before[part + "_seconds"]) / steps * 1e3

    floor = model.floor(batch, 1, args.context + DECODE_STEPS // 2)
    tokens = batch * DECODE_STEPS
    figure = Figure(f"decode, batch {batch}", tokens / seconds, batch / floor, seconds / DECODE_STEPS, known.decode.get(batch))
    host, least = spent("host") + spent("sample"), spent("least")
    whole = spent("model") + host
    parts = ", ".join(f"{part} {spent('least_' + part):.2f}" for part in ("weights", "kv", "arithmetic"))
    above = whole - least - host
    return figure, f"batch {batch}: {whole:.2f} = {least:.2f} at the limit ({parts}) + {above:.2f} above it + {host:.3f} host"


def prefill(model: Model, requests: int, tokens: int, args: argparse.Namespace, known: recorded.Figures) -> Figure:
    seconds = median(args.rounds, lambda: model.generate(requests, tokens, 1).whole)
    steps = max(1, -(-requests * tokens // args.token_budget))
    each = min(tokens, args.token_budget)
    chunks = -(-tokens // each)
    floor = sum(model.floor(1, each, chunk * each) for chunk in range(chunks)) * requests
    if chunks == 1:  # several prompts share a step, and its read of the weights
        floor = steps * model.floor(max(1, requests // steps), tokens, 0)
    return Figure(
        f"prefill {requests}x{tokens}",
        requests * tokens / seconds,
        requests * tokens / floor,
        seconds / steps,
        known.prefill.get((requests, tokens)),
    )


def throughput(model: Model, args: argparse.Namespace, known: recorded.Figures) -> Figure:
    model.generate(8, args.tokens_in, 8)  # warm
    before = model.engine.stats()["steps"]
    seconds = model.generate(args.requests, args.tokens_in, args.tokens_out).whole
    steps = model.engine.stats()["steps"] - before
    batch = min(args.requests, args.max_num_seqs)
    prompts = max(1, args.token_budget // args.tokens_in)
    floor = args.requests / prompts * model.floor(prompts, args.tokens_in, 0)
    floor += args.requests / batch * args.tokens_out * model.floor(batch, 1, args.tokens_in + args.tokens_out // 2)
    tokens = args.requests * args.tokens_out
    return Figure(
        f"{args.requests} requests, {args.tokens_in} in, {args.tokens_out} out",
        tokens / seconds,
        tokens / floor,
        seconds / steps,
        known.requests.get((args.requests, args.tokens_in, args.tokens_out)),
    )


def step_over_context(model: Model, batch: int, args: argparse.Namespace) -> str:
    """A line through the step times at several contexts: what a step costs anyway, and what each token of context adds."""
    steps = 128
    longest = min(args.longest, model.held // batch) - steps - 1
    contexts = [longest // 32, longest // 4, longest // 2, longest]
    times = []
    for context in contexts:
        each = [model.generate(batch, context, steps + 1).decode / steps for _ in range(args.rounds)]
        times.append(statistics.median(each))
    slope, base = np.polyfit([context + steps / 2 for context in contexts], times, 1)
    least = (model.floor(batch, 1, longest) - model.floor(batch, 1, 0)) / longest
    shown = ", ".join(f"{seconds * 1e3:.2f} at {context}" for context, seconds in zip(contexts, times, strict=True))
    return (
        f"step over context, batch {batch}: {base * 1e3:.2f} ms and {slope * 1e9:.1f} ns for each token of context "
        f"({least * 1e9:.1f} ns at the card's limit); ms: {shown}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3-8b", help="a name in benchmarks/shapes, a folder or a config.json")
    parser.add_argument("--load-format", default="dummy", choices=["dummy", "auto"])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the program itself")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp16", "fp32"])
    parser.add_argument("--quantization", default="", choices=["", "int8", "int4", "fp8"], help="rounds weights while loading")
    parser.add_argument("--decode", default="1,8,64,256", help="batch sizes")
    parser.add_argument("--prefill", default="1x1024,1x8192,8x2048", help="prompts x tokens")
    parser.add_argument("--requests", type=int, default=1000, help="0: leave the throughput run out")
    parser.add_argument("--in", dest="tokens_in", type=int, default=512)
    parser.add_argument("--out", dest="tokens_out", type=int, default=256)
    parser.add_argument("--step-profile", action="store_true", help="step time over context")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pages", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", *KV_DTYPES), help="auto: the type that is computed in")
    parser.add_argument("--context", type=int, default=DECODE_CONTEXT, help="tokens that decoding begins with")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    args = parser.parse_args()
    args.prompts = [tuple(int(number) for number in text.split("x")) for text in args.prefill.split(",") if text]
    args.longest = max([tokens for _, tokens in args.prompts] + [args.tokens_in + args.tokens_out, args.context + DECODE_STEPS]) + 1
    return args


def main() -> None:
    args = arguments()
    try:
        model = Model(args)
    except (ValueError, FileNotFoundError, _core.MagaError) as error:
        sys.exit(f"error: {error}")
    known = recorded.VLLM.get(args.shape, recorded.Figures())
    print(f"{args.shape}: {model.about}")
    print(f"start: {model.started}" + (f"; {recorded.NAME}: {known.start_seconds:.0f} s" if known.start_seconds else ""))
    rows = [["", "tok/s", "ms a step", "limit tok/s", "reached", f"{recorded.NAME}*", "ratio"]]
    hosts = []
    for batch in [int(text) for text in args.decode.split(",") if text]:
        figure, host = decode(model, batch, args, known)
        rows.append(figure.cells())
        hosts.append(host)
    for requests, tokens in args.prompts:
        rows.append(prefill(model, requests, tokens, args, known).cells())
    if args.requests:
        rows.append(throughput(model, args, known).cells())
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    print(f"* not run here: {recorded.SOURCE}")
    fp8 = f" ({FP8_FLOPS / 1e12:,.0f} in fp8)" if FP8_FLOPS in model.flops else ""
    print(f"limit: each op at {BANDWIDTH / 1e12} TB/s or {FLOPS / 1e12:.0f} TFLOP/s{fp8}, weights read once a step")
    for host in hosts:
        print(f"ms of a step, {host}")
    if args.step_profile:
        for batch in (1, 16):
            print(step_over_context(model, batch, args))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(f"commit {commit or 'unknown'}; {' '.join(sys.argv[1:]) or 'no options'}")


if __name__ == "__main__":
    main()
