"""Prefill and decode speed of the engine on a model, beside other engines in the same run.

    python benchmarks/engine.py [MODEL] [--quantization int8] [--threads 2] [--peers llama.cpp,transformers] [--exact]
    maga quantize FOLDER AWQ --method awq --group-size 64
    python benchmarks/engine.py AWQ --peers llama.cpp --peer-model FILE.gguf     # of the same bits, for llama.cpp reads GGUF only

Rounds alternate between the engines, and the best round of each counts, so that a busy machine disturbs all alike. Prompts are
random token ids. A figure of ours goes through the whole engine (scheduler, sampler, events), not through the kernels alone.
"""

import argparse
import pathlib
import platform
import select
import subprocess
import time
from collections.abc import Callable, Sequence

import numpy as np
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.demo import demo_model
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from peers import LlamaCpp, Peer, Prompt, Transformers, installed
from rich.console import Console
from rich.table import Table

PAGE_TOKENS = 16


class Ours:
    """The engine on the CPU backend, driven as the server drives it: submit, wait for the event descriptor, poll."""

    def __init__(self, path: pathlib.Path, args: argparse.Namespace, max_sequences: int, max_tokens: int, exact: bool) -> None:
        self.name = "ours, exact fp32" if exact else "ours"
        start = time.perf_counter()
        checkpoint = open_checkpoint(str(path))
        program, _ = build_program(checkpoint)
        backend = _core.cpu_backend(threads=args.threads, quantize_activations=not exact, isa=args.isa)
        weights = load_weights(backend, program, checkpoint, quantization=args.quantization)
        self.weight_bytes = sum(w.bytes for w in weights)
        self.description = backend.describe()
        pages = max_sequences * -(-max_tokens // PAGE_TOKENS) + 64
        model = backend.load(
            program,
            weights,
            tokens=args.token_budget,
            sequences=max_sequences,
            logit_rows=max_sequences,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            kv_dtype="fp32" if exact else "fp16",
        )
        self.engine = _core.Engine(
            backend, model, max_sequences=max_sequences, token_budget=args.token_budget, max_queue=1024, prefix_cache=False
        )
        self.ready_seconds = time.perf_counter() - start
        self.host_share = 0.0

    def _generate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        """Seconds from the moment when every sequence has its first token to the end of the last."""
        before = self.engine.stats()
        params = _core.SamplingParams(max_new_tokens=tokens, temperature=0.0)
        waiting = {self.engine.submit(np.asarray(p, dtype=np.int32), params) for p in prompts}
        running = set(waiting)
        start = all_started = time.perf_counter()
        while running:
            select.select([self.engine.event_fd()], [], [])
            for event in self.engine.poll():
                if event.finish == "error":
                    raise RuntimeError(event.error)
                waiting.discard(event.request)
                if event.finish:
                    running.discard(event.request)
            if waiting:
                all_started = time.perf_counter()
                before = self.engine.stats()
        end = time.perf_counter()
        after = self.engine.stats()
        busy = sum(after[k] - before[k] for k in ("model_seconds", "sample_seconds", "host_seconds"))
        self.host_share = (after["host_seconds"] - before["host_seconds"]) / busy if busy else 0.0
        return end - (start if tokens == 1 else all_started)

    def prefill(self, prompt: Prompt) -> float:
        return self._generate([prompt], 1)

    def decode(self, prompts: Sequence[Prompt], steps: int) -> float:
        return self._generate(prompts, steps + 1)


def best(engines: Sequence[Peer], rounds: int, measure: Callable[[Peer], float]) -> dict[str, float]:
    seconds: dict[str, float] = {e.name: float("inf") for e in engines}
    for _ in range(rounds):
        for engine in engines:
            seconds[engine.name] = min(seconds[engine.name], measure(engine))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path)
    parser.add_argument("--quantization", choices=["", "int8", "int4", "fp8"], default="", help="rounds our weights at load")
    parser.add_argument("--peer-model", type=pathlib.Path, help="what the other engines load; default: MODEL")
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="llama.cpp leaves weights as the file has them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="", help="instruction set of the CPU backend; default: the best of this machine")
    parser.add_argument("--peers", default="llama.cpp,transformers")
    parser.add_argument("--exact", action="store_true", help="measure the exact fp32 mode too")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--context", type=int, default=64, help="tokens each sequence has before decoding")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=512)
    args = parser.parse_args()
    path = args.model or demo_model()
    peer_path = args.peer_model or path
    batches = [int(b) for b in args.batches.split(",")]
    max_tokens = max(args.prefill, args.context + args.steps) + PAGE_TOKENS

    ours = [Ours(path, args, max(batches), max_tokens, exact=False)]
    if args.exact:
        ours.append(Ours(path, args, max(batches), max_tokens, exact=True))
    engines: list[Peer] = [*ours]
    wanted = [p for p in args.peers.split(",") if p and installed(p)]
    if "llama.cpp" in wanted:
        engines.append(LlamaCpp(peer_path, args.threads, max(batches), max_tokens, args.repack))
    if "transformers" in wanted:
        engines.append(Transformers(peer_path, args.threads))

    rng = np.random.default_rng(1)
    prompts = [rng.integers(1000, 40000, size=max(args.prefill, args.context)).tolist() for _ in range(max(batches))]
    rows: list[tuple[str, int, dict[str, float]]] = [
        (f"prefill {args.prefill}", args.prefill, best(engines, args.rounds, lambda e: e.prefill(prompts[0][: args.prefill])))
    ]
    shares = []
    for batch in batches:
        some = [p[: args.context] for p in prompts[:batch]]
        takers = [e for e in engines if not (isinstance(e, Transformers) and batch > 8)]
        rows.append(
            (f"decode, batch {batch}", batch * args.steps, best(takers, args.rounds, lambda e, s=some: e.decode(s, args.steps)))
        )
        shares.append(f"{ours[0].host_share:.2%} at batch {batch}")

    what = " ".join([path.name, *filter(None, [args.quantization])])
    what += f" (others: {peer_path.name})" if peer_path != path and len(engines) > len(ours) else ""
    table = Table(title=f"{what}, tokens/s, {args.threads} threads, best of {args.rounds}")
    for column in ("", *(e.name for e in engines), *(f"{ours[0].name} / {e.name}" for e in engines[1:])):
        table.add_column(column, justify="left" if not column else "right")
    for label, tokens, seconds in rows:
        speeds = [f"{tokens / seconds[e.name]:,.0f}" if e.name in seconds else "-" for e in engines]
        ratios = [f"{seconds[e.name] / seconds[ours[0].name]:.2f}" if e.name in seconds else "-" for e in engines[1:]]
        table.add_row(label, *speeds, *ratios)
    console = Console(width=132)
    console.print(table)
    console.print(f"host work outside kernels and sampling: {', '.join(shares)}")
    console.print(f"weights {ours[0].weight_bytes / 2**20:.0f} MiB, loaded in {ours[0].ready_seconds:.1f} s; {ours[0].description}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    console.print(f"{cpu_name()}; {platform.platform()}; commit {commit or 'unknown'}")


def cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
