"""`maga bench`: a small load, how fast it went, and what share of the device's limit that was."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import typer

from maga_transformer.cli.options import File, load
from maga_transformer.cli.speaker import Answer, Drawing, LocalAnswer, LocalSpeaker, RemoteAnswer, RemoteSpeaker, open_speaker
from maga_transformer.cli.talk import Key, Url, Where, path_of
from maga_transformer.progress import Progress, progress_bar

_PLAIN_IDS = (100, 1000)  # in every vocabulary, and no special tokens in most


@dataclass(frozen=True)
class Load:
    requests: int
    concurrency: int
    input_len: int
    output_len: int
    seed: int

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)
        return [[draw.randrange(*_PLAIN_IDS) for _ in range(self.input_len)] for _ in range(self.requests)]


@dataclass
class Seen:
    """Seconds from a request to its first text, and between the pieces of text of one answer."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    ended: int = 0  # answers
    tokens: int = 0
    seconds: float = 0.0
    least: float = 0.0  # that the device needed for the engine's steps
    busy: float = 0.0  # that the steps took


def bench(
    where: Where = None,
    url: Url = "",
    api_key: Key = "",
    num_prompts: Annotated[int, typer.Option("--num-prompts", "--requests", min=1, help="requests in all")] = 32,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", "--concurrency", min=1, help="requests at once")] = 8,
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", min=1, help="tokens of a prompt")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", "--random-output-len", min=1, help="tokens of an answer")] = 64,
    seed: Annotated[int, typer.Option(help="of the random prompts")] = 1,
    config: File = "",
    *,
    settings: dict[str, object],
) -> None:
    """Measure a model in this process, or a server behind a URL, with random prompts."""
    asked = Load(num_prompts, max_concurrency, input_len, output_len, seed)
    with open_speaker(url or where, api_key, "", load(path_of(where), config, settings)) as speaker:
        target = _Local(speaker) if isinstance(speaker, LocalSpeaker) else _Remote(speaker)
        warm = Load(max_concurrency, max_concurrency, input_len, min(8, output_len), seed + 1)
        _measure(target, warm, lambda done, total: None)
        with progress_bar("requests") as progress:
            seen = _measure(target, asked, progress)
    for line in report(speaker.name, asked, seen):
        print(line)


class _Local:
    def __init__(self, speaker: LocalSpeaker) -> None:
        self._llm = speaker.llm

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        return LocalAnswer(self._llm.stream(prompt, max_new_tokens=tokens, temperature=0, ignore_eos=True))

    def least_and_busy(self) -> tuple[float, float]:
        stats = self._llm.stats()
        return stats["least_seconds"], sum(stats[part + "_seconds"] for part in ("model", "sample", "host"))


class _Remote:
    def __init__(self, speaker: Any) -> None:
        assert isinstance(speaker, RemoteSpeaker)
        self._speaker = speaker

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        body = {"prompt": prompt, "ignore_eos": True}
        return RemoteAnswer(self._speaker.stream("/v1/completions", body, Drawing(max_tokens=tokens, temperature=0.0)))

    def least_and_busy(self) -> tuple[float, float]:
        """Zeros where the server does not tell."""
        from prometheus_client.parser import text_string_to_metric_families

        from maga_transformer.request import RequestError

        least = busy = 0.0
        try:
            families = list(text_string_to_metric_families(self._speaker.get("/metrics")))
        except (RequestError, ValueError):
            return 0.0, 0.0
        for sample in (sample for family in families for sample in family.samples):
            part = sample.labels.get("part")
            if sample.name.endswith("engine_least_seconds_total") and part == "all":
                least += sample.value
            elif sample.name.endswith("engine_seconds_total") and part in ("model", "sample", "host"):
                busy += sample.value
        return least, busy


def _measure(target: _Local | _Remote, load: Load, progress: Progress) -> Seen:
    seen, lock = Seen(), threading.Lock()
    prompts = load.prompts()

    def ask(prompt: list[int]) -> None:
        answer = target.ask(prompt, load.output_len)
        times = [time.monotonic(), *(time.monotonic() for _ in answer)]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        with lock:
            seen.first += gaps[:1]
            seen.between += gaps[1:]
            seen.tokens += answer.tokens
            seen.ended += 1
            progress(seen.ended, load.requests)

    least, busy = target.least_and_busy()
    started = time.monotonic()
    with ThreadPoolExecutor(load.concurrency, "bench") as pool:
        for _ in pool.map(ask, prompts):
            pass
    seen.seconds = time.monotonic() - started
    least_after, busy_after = target.least_and_busy()
    seen.least, seen.busy = least_after - least, busy_after - busy
    return seen


def report(name: str, load: Load, seen: Seen) -> list[str]:
    lines = [
        f"model           {name}",
        f"load            {load.requests} requests, {load.concurrency} at once, {load.input_len} tokens in, {load.output_len} out",
        f"output          {seen.tokens / seen.seconds:,.1f} tokens/s",
        f"total           {(seen.tokens + load.requests * load.input_len) / seen.seconds:,.1f} tokens/s with the prompts', "
        f"{load.requests / seen.seconds:.2f} requests/s, {seen.seconds:.2f} s",
    ]
    for label, values in (("first token", seen.first), ("between tokens", seen.between)):
        if values:
            p50, p90, p99 = (1e3 * sorted(values)[min(len(values) - 1, int(len(values) * share))] for share in (0.5, 0.9, 0.99))
            lines.append(f"{label:15} p50 {p50:.2f} ms, p90 {p90:.2f} ms, p99 {p99:.2f} ms")
    if seen.least > 0 and seen.busy > 0:
        lines.append(
            f"of the limit    {seen.least / seen.busy:.0%}: the steps took {seen.busy:.2f} s, the device could not do them "
            f"in less than {seen.least:.2f} s"
        )
    if seen.tokens != load.requests * load.output_len:
        lines.append(f"note            {load.requests * load.output_len} output tokens were asked for, {seen.tokens} came")
    return lines
