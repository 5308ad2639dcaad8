"""The goals, each a function that puts a server under something and tells what it saw. A goal that does not hold raises Missed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load import VOCABULARY, Ask, Client, Said, draw
from server.conftest import ServerProcess, running_server

SETTINGS = {
    "LOAD_FORMAT": "dummy",
    "KV_CACHE_MEM_MB": "1",  # a few sequences fit: they evict and preempt each other
    "SEQ_SIZE_PER_BLOCK": "16",
    "MAX_SEQ_LEN": "256",
    "MAX_QUEUE": "1024",
    "ACT_TYPE": "fp32",
    "FT_SERVER_TEST": "0",
    "THREADS": "1",
}


class Missed(AssertionError):
    pass


@dataclass
class Soak:
    model: Path
    scale: float  # 1: sizes for CI
    seed: int
    totals: list[Said] = field(default_factory=list)
    sick: list[str] = field(default_factory=list)  # health answers other than ok, where none was due

    def size(self, count: int) -> int:
        return max(1, round(count * self.scale))

    @contextmanager
    def server(self, **settings: str) -> Iterator[ServerProcess]:
        with running_server(self.model, **{**SETTINGS, **settings}) as server:
            yield server

    @contextmanager
    def watched(self, server: ServerProcess) -> Iterator[None]:
        """Health is asked all the time, by a thread of its own."""
        end = threading.Event()

        def look() -> None:
            while not end.wait(0.25):
                answer = server.get("/health")
                if answer.status_code != 200:
                    self.sick.append(answer.text)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


def need(holds: object, told: str) -> None:
    if not holds:
        raise Missed(told)


def settled(server: ServerProcess, seconds: float = 20.0) -> dict[str, float]:
    """The gauges, once nothing runs or waits and no page is held."""
    end = time.monotonic() + seconds
    while True:
        gauges = server.gauges()
        busy = [gauges["maga_num_requests_running"], gauges["maga_num_requests_waiting"], gauges['maga_kv_pages{state="live"}']]
        if not any(busy):
            return gauges
        need(time.monotonic() < end, f"running, waiting, live pages stay at {busy}")
        time.sleep(0.05)


def memory(server: ServerProcess, line: str) -> float:
    """MiB, of a line of /proc/PID/status."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(row.split()[1]) / 1024 for row in status.splitlines() if row.startswith(line))


def go(url: str, work: Callable[[Client], Any]) -> Any:
    async def run() -> Any:
        async with Client(url) as client:
            return await work(client)

    return asyncio.run(run())


def all_ended(said: list[Said]) -> None:
    lost = [one for one in said if not one.left and not (one.ended and not one.error)]
    need(not lost, f"{len(lost)} of {len(said)} did not end well: {lost[0].status if lost else ''} {lost[0].error if lost else ''}")


def solo_equals(server: ServerProcess, said: list[Said]) -> int:
    def alone(client: Client) -> Any:
        return client.say_all([Ask(one.ask.body) for one in said], 1)

    for one, again in zip(said, go(server.url, alone), strict=True):
        need(one.texts == again.texts, f"seed {one.ask.body}: {one.texts} beside others, {again.texts} alone")
    return len(said)


def soak(run: Soak, server: ServerProcess) -> str:
    random_, rounds = random.Random(run.seed), 10
    each, sizes = run.size(200), []
    said: list[Said] = []
    with run.watched(server):
        for _ in range(rounds):
            asks = draw(random_, each, leaving=0.2)
            said += go(server.url, lambda client, asks=asks: client.say_all(asks, 32))
            settled(server)
            sizes.append(memory(server, "VmRSS"))
    run.totals += said
    all_ended(said)
    whole = [one for one in said if not one.left]
    same = solo_equals(server, whole[::50])
    gauges = settled(server)
    slope = (sizes[-1] - sizes[1]) / (each * (rounds - 2)) * 10_000
    grown = sizes[-1] - sizes[1]
    need(slope < 1 or grown < 4, f"memory grew by {grown:.1f} MiB, {slope:.1f} a 10,000 requests: {sizes}")
    preempted = gauges["maga_num_preemptions_total"]
    need(preempted > each / 10, f"only {preempted:.0f} preemptions: the pool is too large for the load")
    return (
        f"{len(said)} requests, {sum(one.left for one in said)} left, {preempted:.0f} preemptions, {same} as alone, "
        f"memory {grown:+.1f} MiB"
    )


def load_held(run: Soak, server: ServerProcess) -> str:
    asks = [Ask({**ask.body, "n": 1, "max_tokens": 32}) for ask in draw(random.Random(run.seed + 1), run.size(256))]
    started = time.monotonic()
    with run.watched(server):
        said = go(server.url, lambda client: client.say_all(asks, min(256, len(asks))))
    seconds = time.monotonic() - started
    run.totals += said
    all_ended(said)
    gaps = sorted(b - a for one in said for a, b in zip(one.times, one.times[1:], strict=False))
    p99 = gaps[int(0.99 * len(gaps))]
    need(p99 <= 1, f"99 of 100 gaps are up to {p99:.2f} s")
    return f"{len(said)} streams at once, no error, {32 * len(said) / seconds:.0f} tokens/s, p99 gap {1e3 * p99:.0f} ms"


def overload(run: Soak) -> str:
    """Far more at once than the queue takes."""
    with run.server(MAX_QUEUE="16", MAX_NUM_SEQS="8") as server:
        asks = draw(random.Random(run.seed + 2), max(60, run.size(200)))
        with run.watched(server):
            said = go(server.url, lambda client: client.say_all(asks, len(asks)))
        settled(server, 5)
    taken, refused = [one for one in said if one.status == 200], [one for one in said if one.status == 429]
    need(len(taken) + len(refused) == len(said), f"answers { ({one.status for one in said}) }")
    all_ended(taken)
    need(refused and all(int(one.retry_after) >= 1 for one in refused), "a refusal without Retry-After")
    return f"{len(said)} at once: {len(taken)} answered, {len(refused)} refused with Retry-After, idle within 5 s"


def cancel(run: Soak) -> str:
    """Steps that take half a second, so that answers last until their clients leave: while queued, in prefill, amid the text."""
    with run.server(MAGA_FAULT="slow:forward:1000000", KV_CACHE_MEM_MB="4") as server:
        asks = draw(random.Random(run.seed + 3), run.size(100), leaving=1.0)
        for ask in asks:
            ask.body["max_tokens"] = 120
        said = go(server.url, lambda client: client.say_all(asks, 32))
        started = time.monotonic()
        aborted = settled(server)['maga_request_success_total{finished_reason="abort"}']
        need(aborted > len(said) / 4, f"only {aborted:.0f} outputs were cancelled")
    return f"{len(said)} clients left, {aborted:.0f} outputs cancelled, no page held {time.monotonic() - started:.2f} s later"


def hostile(run: Soak, server: ServerProcess) -> str:
    random_ = random.Random(run.seed + 4)
    names = [
        "prompt",
        "max_tokens",
        "n",
        "stop",
        "temperature",
        "top_p",
        "logit_bias",
        "seed",
        "generate_config",
        "messages",
        "stream",
    ]
    atoms = [None, True, -1, 0, 2**31, 2**63, 1e308, "", "\0", "\ud800", "a" * 5000, [], {}, [[]], [None], {"a": {}}, [-1], "NaN"]
    statuses: dict[int, int] = {}
    for _ in range(run.size(400)):
        body = {random_.choice(names): random_.choice(atoms) for _ in range(random_.randrange(1, 6))}
        body.setdefault("max_new_tokens", 2)
        path = random_.choice(["/", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings"])
        status = server.client.post(server.url + path, content=json.dumps(body).encode()).status_code
        statuses[status] = statuses.get(status, 0) + 1
        need(status < 500, f"{status} for {path} {body}")
    settled(server)
    need(not any("Traceback" in line for line in server.lines), "a traceback in the log")
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))


def faults(run: Soak) -> str:
    kinds = ("throw:forward:3", "throw:sample:3", "throw:allocate:3", "slow:forward:3", "slow:sample:3", "no_pages:allocate:3")
    failed = 0
    for kind in kinds:
        with run.server(MAGA_FAULT=kind) as server:
            asks = draw(random.Random(run.seed + 5), 8)
            started = time.monotonic()
            said = go(server.url, lambda client, asks=asks: client.say_all(asks, 8))
            need(all(one.ended for one in said), f"{kind}: a stream without an end")
            need(time.monotonic() - started < 10, f"{kind}: took {time.monotonic() - started:.1f} s")
            failed += sum(bool(one.error) for one in said)
            settled(server)
            solo_equals(server, [one for one in said if not one.error][:2])
    need(failed, "no fault was felt")
    return f"{len(kinds)} kinds: every request ended within 10 s, {failed} with an error, and the server went on"


def shutdown(run: Soak) -> str:
    random_, ends, times = random.Random(run.seed + 6), [], run.size(3)
    for _ in range(times):
        with run.server(DRAIN_TIMEOUT="30", MAGA_FAULT="slow:forward:1000000", KV_CACHE_MEM_MB="16") as server:
            asks = [Ask({**ask.body, "max_tokens": 6}) for ask in draw(random_, 64)]
            threading.Timer(random_.uniform(1.5, 3), server.process.send_signal, (signal.SIGTERM,)).start()
            said = go(server.url, lambda client, asks=asks: client.say_all(asks, 64))
            need(server.process.wait(60) == 0, f"status {server.process.returncode}")
            running = [one for one in said if one.status == 200]
            lost = [one for one in running if not one.ended]
            need(not lost, f"{len(lost)} of {len(running)} streams had no end")
            ends += running
    need(ends, "no stream ran")
    return f"{times} times SIGTERM: {len(ends)} running streams ended, status 0"


def same_answer(run: Soak, server: ServerProcess) -> str:
    asks = [ask for ask in draw(random.Random(run.seed + 7), run.size(80)) if "n" not in ask.body]
    alone = go(server.url, lambda client: client.say_all([Ask({**ask.body, "cache_salt": "alone"}) for ask in asks], 1))
    beside = go(server.url, lambda client: client.say_all(asks, 32))
    cached = go(server.url, lambda client: client.say_all(asks, 1))
    run.totals += [*alone, *beside, *cached]
    by_prompt = {str(one.ask.body): one.texts for one in beside}
    for ask, first, again in zip(asks, alone, cached, strict=True):
        need(first.texts == by_prompt[str(ask.body)] == again.texts, f"{ask.body}: {first.texts}, {again.texts}")
    hits = sum(one.usage["prompt_tokens_details"]["cached_tokens"] > 0 for one in cached)
    need(hits, "the prefix cache was not met")
    return f"{len(asks)} prompts alone, beside 31 others, and {hits} from the prefix cache: all texts equal"


def not_finite(run: Soak) -> str:
    rows = run.size(20)
    with run.server(MAGA_FAULT=f"nan:forward:{rows}", KV_CACHE_MEM_MB="4") as server:
        asks = [Ask({**ask.body, "n": 1}) for ask in draw(random.Random(run.seed + 8), rows + 60)]
        said = go(server.url, lambda client: client.say_all(asks, 16))
        found = [one for one in said if one.error == "non-finite logits"]
        counted = settled(server)["maga_corrupted_requests_total"]
        need(len(found) == counted == rows, f"{rows} rows were broken, {len(found)} errors told, {counted:.0f} counted")
        whole = [one for one in said if not one.error]
        solo_equals(server, whole[:20])
        clean = go(server.url, lambda client: client.say_all([one.ask for one in found], 4))
        all_ended(clean)
    return f"{rows} broken rows: each found, {len(whole)} neighbours unchanged, none left in the cache"


def tenants(run: Soak, server: ServerProcess) -> str:
    random_ = random.Random(run.seed + 9)
    prompt = [random_.randrange(3, VOCABULARY) for _ in range(64)]
    count, hits = run.size(24), 0
    for tenant in range(count):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "cache_salt": f"tenant-{tenant}"}
        first, second = go(server.url, lambda client, body=body: client.say_all([Ask(body), Ask(body)], 1))
        run.totals += [first, second]
        need(first.usage["prompt_tokens_details"]["cached_tokens"] == 0, f"tenant {tenant} met another's pages")
        hits += second.usage["prompt_tokens_details"]["cached_tokens"] > 0
        need(first.texts == second.texts, "another text")
    need(hits > count / 2, "tenants do not meet their own pages")
    return f"{count} tenants with one prompt: none met another's pages, {hits} their own"


def books(run: Soak, server: ServerProcess) -> str:
    gauges = settled(server)
    pages = sum(gauges[f'maga_kv_pages{{state="{state}"}}'] for state in ("live", "cached", "free"))
    stats = server.get("/page/engine").json()["engine"]
    need(pages == stats["pages_total"], f"{pages:.0f} pages of {stats['pages_total']}")
    ended = sum(value for name, value in gauges.items() if name.startswith("maga_request_success_total"))
    need(ended == gauges["maga_e2e_request_latency_seconds_count"], "outputs and latencies differ")
    generated = gauges["maga_generation_tokens_total"]
    need(gauges["maga_request_generation_tokens_sum"] == generated, "tokens of outputs and of the engine differ")
    told = sum(one.usage.get("completion_tokens", 0) for one in run.totals)
    need(told <= generated, "more tokens were told than generated")
    return f"{ended:.0f} outputs, {generated:.0f} tokens, {pages:.0f} pages: every sum agrees"


def health(run: Soak) -> str:
    need(not run.sick, f"false alarms: {run.sick[:2]}")
    with run.server(MAGA_FAULT="slow:forward:6", STALL_TIMEOUT="0.3") as server:
        turned: list[float] = []
        started = time.monotonic()

        def look() -> None:
            while not turned and time.monotonic() - started < 10:
                if server.get("/health").status_code == 503:
                    turned.append(time.monotonic() - started)

        thread = threading.Thread(target=look)
        thread.start()
        go(server.url, lambda client: client.say_all(draw(random.Random(run.seed), 1), 1))
        thread.join()
        need(turned, "health did not notice a stall")
        end = time.monotonic() + 10
        while server.get("/health").status_code != 200:
            need(time.monotonic() < end, "health did not recover")
            time.sleep(0.1)
    return f"no false alarm; a stall was told after {turned[0]:.1f} s, and its end"


def bounded(run: Soak, server: ServerProcess) -> str:
    peak = memory(server, "VmHWM")
    need(peak <= 1 + 300, f"{peak:.0f} MiB at most, though weights and pages need 2")
    return f"{peak:.0f} MiB at most, of them less than 2 for weights and pages"
