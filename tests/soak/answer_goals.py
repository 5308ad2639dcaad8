"""6.10 to 6.12, 6.14 and 6.16: the same answer however it comes about, rows that are no numbers, tenants, books and memory."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from maga_transformer.server.auth import Keys
from server.conftest import ServerProcess
from soak.load import Ask, Said, draw, prompt_of
from soak.run import ALLOWED_MIB, WEIGHTS_MIB, Soak, all_well, memory, need, same, say, settled


def same_answer(run: Soak) -> str:
    """Prompts by themselves, and the same ones in every other way that a scheduler knows."""
    drawn = draw(random.Random(run.seed + 7), run.size(80))
    asks = [Ask({**ask.body, "n": 1}) for ask in drawn]
    forked = [Ask({**ask.body, "n": 3}) for ask in asks]
    counts = {}
    with run.server(KV_CACHE_MEM_MB="16") as server:
        alone = say(server, [Ask({**ask.body, "cache_salt": "alone"}) for ask in asks], 1)
        all_well(alone)
        same(alone, say(server, asks, 32), "beside 31 others")
        cached = say(server, asks, 1)
        same(alone, cached, "from the prefix cache")
        for one in (forks := say(server, forked, 4)):
            need(set(one.texts) == {0, 1, 2}, "not three outputs")
            one.texts = {0: one.texts[0]}
        same(alone, forks, "forked")
        counts["hits"] = sum(one.cached > 0 for one in cached)
        need(counts["hits"] > len(asks) / 2, "the prefix cache was hardly met")
        need(not settled(server)["maga_num_preemptions_total"], "preempted where nothing should be")
    with run.server(MAX_NUM_SEQS="16", MAX_NUM_BATCHED_TOKENS="16", KV_CACHE_MEM_MB="16") as server:
        before = settled(server)["maga_engine_steps_total"]
        same(alone, say(server, asks, 16), "in chunks of 16 tokens")
        counts["steps"] = settled(server)["maga_engine_steps_total"] - before
    with run.server(MAX_NUM_SEQS="32", MAGA_FAULT=f"no_pages:allocate:{2 * len(asks)}:40") as server:
        same(alone, say(server, asks, 32), "preempted")
        counts["preempted"] = settled(server)["maga_num_preemptions_total"]
        need(counts["preempted"] >= 2 * len(asks), f"only {counts['preempted']:.0f} preemptions")
    return (
        f"{len(asks)} prompts alone, beside 31 others, {counts['hits']} from the prefix cache, forked, in chunks, and with "
        f"{counts['preempted']:.0f} preemptions: all texts equal; adapters and speculation: not there yet"
    )


def not_finite(run: Soak) -> str:
    rows = run.size(50)
    asks = [Ask({**ask.body, "n": 1}) for ask in draw(random.Random(run.seed + 8), rows + 100)]
    with run.server(KV_CACHE_MEM_MB="8") as whole:
        right = say(whole, asks, 16)
    with run.server(MAGA_FAULT=f"nan:forward:{rows}:20", KV_CACHE_MEM_MB="8") as server:
        said = say(server, asks, 16)
        found = [index for index, one in enumerate(said) if one.error == "non-finite logits"]
        counted = settled(server)["maga_corrupted_requests_total"]
        need(len(found) == counted == rows, f"{rows} rows were broken, {len(found)} errors told, {counted:.0f} counted")
        others = [index for index in range(len(asks)) if index not in found]
        same([right[index] for index in others], [said[index] for index in others], "beside a broken row")
        same(right, say(server, asks, 16), "after broken rows")
    return f"{rows} broken rows: each found in its step, {len(others)} neighbours unchanged, nothing of them left in the cache"


def tenants(run: Soak) -> str:
    """64 tenants with the same prompts in a pool that evicts and preempts, then what their waiting times tell, and keys'."""
    random_ = random.Random(run.seed + 9)
    prompts = [prompt_of(random_, 64) for _ in range(3)]
    seen: set[tuple[str, str]] = set()

    def ask() -> Ask:
        salt, prompt = f"tenant-{random_.randrange(64)}", random_.choice(prompts)
        body = {"prompt": prompt, "max_tokens": random_.randrange(1, 20), "temperature": 0, "ignore_eos": True}
        return Ask({**body, "stream": True, "cache_salt": salt})

    with run.server() as server:
        texts: dict[str, str] = {}
        foreign = own = 0
        for _ in range(run.size(13)):
            said = say(server, [ask() for _ in range(25)], 8)
            all_well(said)
            asked = Counter(map(_salted, said))
            for one in said:
                salt, prompt = _salted(one)
                shorter, longer = sorted((texts.setdefault(prompt, one.texts[0]), one.texts[0]), key=len)
                need(longer.startswith(shorter), f"{one.texts[0]!r} instead of {texts[prompt]!r}")
                texts[prompt] = longer
                own += one.cached > 0
                foreign += one.cached > 0 and (salt, prompt) not in seen and asked[salt, prompt] == 1
            seen |= set(asked)
        need(foreign == 0, f"{foreign} requests met pages of another salt")
        need(own > 0, "tenants do not meet their own pages")
        evicted = settled(server)["maga_prefix_cache_evictions_total"]
        need(evicted > 0, "nothing was evicted")
    pairs = min(2000, run.size(150))
    with run.server(KV_CACHE_MEM_MB="16") as server:
        share = _told_by_time(server, random_, pairs)
    bound = max(0.05, 3.5 * math.sqrt((2 * pairs + 1) / (12 * pairs**2)))
    need(abs(share - 0.5) <= bound, f"waiting times tell of another's pages: AUC {share:.3f}")
    t = min((key_timing() for _ in range(3)), key=abs)  # what a comparison tells, it tells every time
    need(abs(t) < 4.5, f"the time of a comparison tells of a key: Welch's t {t:.1f}")
    return (
        f"64 tenants, {run.size(13) * 25} requests, {own} met their own pages, none another's, {evicted:.0f} evictions; waiting "
        f"for what another has cached: AUC {share:.3f} of {pairs} pairs (within {bound:.2f} of a half); keys: Welch's t {t:.1f}"
    )


def _salted(one: Said) -> tuple[str, str]:
    return one.ask.body["cache_salt"], str(one.ask.body["prompt"])


def _told_by_time(server: ServerProcess, random_: random.Random, pairs: int) -> float:
    """The chance that a first token which another tenant's pages could bring comes sooner than one that nobody's could."""
    sampling = {"max_tokens": 1, "temperature": 0, "stream": True}
    hit, miss = [], []
    for _ in range(pairs):
        known = prompt_of(random_, 200)
        say(server, [Ask({"prompt": known, "cache_salt": "theirs", **sampling})], 1)
        both = [(hit, known), (miss, prompt_of(random_, 200))]
        random_.shuffle(both)
        for times, prompt in both:
            (one,) = say(server, [Ask({"prompt": prompt, "cache_salt": "mine", **sampling})], 1)
            need(one.well and one.cached == 0, "another's pages were met")
            times.append(one.times[0])
    return sum((a < b) + 0.5 * (a == b) for a in hit for b in miss) / pairs**2


def key_timing(tries: int = 20_000) -> float:
    """Welch's t between keys that are wrong from the first byte on and keys that are wrong in the last, at random turns."""
    key = "sk-" + "0123456789abcdef" * 3
    keys = Keys([key], [])
    wrong = ["x" * len(key), key[:-1] + "x"]
    scopes = [{"path": "/", "method": "POST", "headers": [(b"authorization", b"Bearer " + given.encode())]} for given in wrong]
    order = [0, 1] * tries
    random.Random(tries).shuffle(order)
    times: tuple[list[int], list[int]] = ([], [])
    for which in order:
        started = time.perf_counter_ns()
        try:
            keys.check(scopes[which])
        except Exception:  # refused, as it must be
            times[which].append(time.perf_counter_ns() - started)
    need(len(times[0]) == len(times[1]) == tries, "a wrong key was taken")
    return _welch(*times)


def _welch(first: Sequence[int], second: Sequence[int]) -> float:
    """Without the slowest tenth of both, which tells of the machine."""
    bound = statistics.quantiles([*first, *second], n=10)[-1]
    groups = [[value for value in group if value <= bound] for group in (first, second)]
    means, shares = [statistics.fmean(group) for group in groups], [statistics.variance(group) / len(group) for group in groups]
    return (means[0] - means[1]) / math.sqrt(sum(shares))


def books(run: Soak, server: ServerProcess) -> str:
    """After the soak, and of a load that no client leaves also to the token."""
    gauges = settled(server)
    _balance(server, gauges)
    left = sum(one.left for one in run.said)
    cancelled = gauges['maga_http_requests_answered_total{outcome="cancelled"}']
    need(cancelled <= left, f"{cancelled:.0f} requests were left, but only {left} clients did so")
    asks = draw(random.Random(run.seed + 10), run.size(120))
    asks += [Ask({**ask.body, "temperature": -1.0}) for ask in asks[:20]]
    said = say(server, asks, 16)
    after = settled(server)
    _balance(server, after)
    grown = {name: after[name] - gauges.get(name, 0) for name in after}
    whole, refused = sum(one.well for one in said), sum(one.status == 400 for one in said)
    need(whole + refused == len(said) and refused == 20, f"{whole} answers and {refused} refusals of {len(said)}")
    for outcome, count in (("finished", whole), ("rejected", refused), ("cancelled", 0), ("failed", 0)):
        told = grown[f'maga_http_requests_answered_total{{outcome="{outcome}"}}']
        need(told == count, f"{told:.0f} requests {outcome}, {count} by their clients")
    for name, field in (("maga_generation_tokens_total", "completion_tokens"), ("maga_prompt_tokens_total", "prompt_tokens")):
        told = sum(one.usage.get(field, 0) for one in said)
        need(told == grown[name], f"{told} {field} by the answers, {grown[name]:.0f} by {name}")
    hits = sum(one.cached for one in said if one.well)
    need(hits == grown["maga_prefix_cache_hits_total"], f"{hits} cached tokens by the answers, not so by the counter")
    received, tokens = after["maga_http_requests_received_total"], after["maga_generation_tokens_total"]
    return f"{received:.0f} requests, {tokens:.0f} tokens: received = finished + cancelled + rejected + failed, usage = counters"


def _balance(server: ServerProcess, gauges: dict[str, float]) -> None:
    pages = sum(gauges[f'maga_kv_pages{{state="{state}"}}'] for state in ("live", "cached", "free"))
    stats = server.get("/page/engine").json()["engine"]
    need(pages == stats["pages_total"], f"{pages:.0f} pages of {stats['pages_total']}")
    ended = sum(gauges[f'maga_requests_ended_total{{end="{end}"}}'] for end in ("finished", "cancelled", "failed"))
    need(ended == gauges["maga_requests_total"], f"{ended:.0f} of {gauges['maga_requests_total']:.0f} requests ended")
    outputs = sum(value for name, value in gauges.items() if name.startswith("maga_request_success_total"))
    need(outputs == gauges["maga_e2e_request_latency_seconds_count"], "outputs and latencies differ")
    need(
        gauges["maga_request_generation_tokens_sum"] == gauges["maga_generation_tokens_total"],
        "tokens of outputs and engine differ",
    )


def bounded(run: Soak) -> str:
    """The most memory of every server of this run, and what one large request adds before it is admitted."""
    for peak, pages in run.peaks:
        need(peak <= WEIGHTS_MIB + pages + ALLOWED_MIB, f"{peak:.0f} MiB at most, {pages:.0f} of them for pages")
    bodies = {
        "a prompt beyond the context": {"prompt": "word " * 300_000},
        "ids beyond the context": {"prompt": [5] * 60_000},
        "a body beyond the limit": {"prompt": "x" * (5 << 20)},
        "many outputs": {"prompt": "a", "n": 10**6},
    }
    grown: dict[str, float] = {}
    with run.server() as server:
        for _ in range(2):  # the first time also loads code
            for name, body in bodies.items():
                before = _reset_peak(server)
                status = server.post("/v1/completions", body).status_code
                need(status in (400, 413), f"{status} for {name}")
                grown[name] = memory(server, "VmHWM") - before
    worst = max(grown, key=lambda name: grown[name])
    need(grown[worst] <= 16, f"{grown[worst]:.1f} MiB more for {worst}")
    most = max((peak for peak, _ in run.peaks), default=0.0)
    return (
        f"{most:.0f} MiB at most in {len(run.peaks)} servers; a request that is refused adds {grown[worst]:.1f} MiB at most "
        f"({worst})"
    )


def _reset_peak(server: ServerProcess) -> float:
    """Returns the present size, in MiB."""
    with open(f"/proc/{server.process.pid}/clear_refs", "w") as file:
        file.write("5")
    return memory(server, "VmHWM")
