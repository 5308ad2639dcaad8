"""6.7 to 6.9 and 6.15: faults at every place, ranks that are lost, shutdown, and health that tells the truth."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from server.conftest import ServerProcess
from soak.clock import jumping_clock
from soak.faults import CASES, ELSEWHERE, PHASES, PLACES, Case
from soak.load import Ask, Said, draw
from soak.run import Soak, all_well, need, same, say, settled, stop


def fault_load(seed: int) -> list[Ask]:
    """Also outputs that fork and that follow a grammar."""
    return draw(random.Random(seed + 5), 10, grammars=0.2)


def faults(run: Soak) -> str:
    clock = jumping_clock(run.scratch)
    asks = fault_load(run.seed)
    with run.server(KV_CACHE_MEM_MB="4") as server:
        right = say(server, asks, 8)
        all_well(right)

    def survive(case: Case) -> tuple[str, int]:
        with run.server(KV_CACHE_MEM_MB="4", **case.settings(clock)) as server:
            failed = survived(server, case, asks, right)
        return case.kind, failed

    cases = [case for case in CASES for _ in range(run.size(1)) if case.kind != "clock" or clock]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(survive, cases))
    failed = Counter[str]()
    for kind, count in results:
        failed[kind] += count
    told = ", ".join(f"{kind} {failed[kind]}" for kind in dict.fromkeys(kind for kind, _ in results))
    without = "; ".join(f"{kind}: {why}" for kind, why in ELSEWHERE.items())
    return (
        f"{len(cases)} cases, {len(PLACES)} places: every request ended within 10 s, right or with the fault's error (outputs that "
        f"failed: {told}), and the server went on, or said that it cannot; {without}{'' if clock else '; no compiler: no clock'}"
    )


def survived(server: ServerProcess, case: Case, asks: list[Ask], right: list[Said]) -> int:
    """Returns how many requests failed. Health and the watchdog are looked at too (6.15)."""
    need(not _children(server), f"{_children(server)} are children of the server: their loss is to be tried")
    seen, end = set[str](), threading.Event()

    def look() -> None:
        over = False
        while not over:  # once more at the end: a loop is lost in a moment
            over = end.wait(0.05)
            seen.add(str(server.get("/health").json()))

    watcher = threading.Thread(target=look)
    watcher.start()
    said = say(server, asks, 8)
    failed = [one for one in said if one.error]
    slowest = max(one.seconds for one in said)
    need(all(one.ended for one in said), f"{case.name}: a stream without an end")
    need(slowest < 10, f"{case.name}: a request took {slowest:.1f} s")
    need(bool(failed) == bool(case.error), f"{case.name}: {len(failed)} errors: {failed and failed[0].error}")
    need(all(case.error in one.error for one in failed), f"{case.name}: {[one.error for one in failed]}")
    good = [index for index, one in enumerate(said) if not one.error]
    same([right[index] for index in good], [said[index] for index in good], case.name)
    if case.place == "loop":
        _is_lost(server, case)
    else:
        settled(server)
        same(right, say(server, asks, 8), f"after {case.name}")
    end.set()
    watcher.join()
    sick = seen - {"ok"}
    need(bool(sick) == (case.kind == "slow" or case.place == "loop"), f"{case.name}: health said {seen}")
    need(case.kind != "slow" or any(told.endswith(PHASES[case.place]) for told in sick), f"{case.name}: health said {sick}")
    status = stop(server)
    need(status == 0, f"{case.name}: exit status {status}")
    return len(failed)


def _is_lost(server: ServerProcess, case: Case) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    need(answer.status_code == 500 and case.error in answer.text, f"{case.name}: then {answer.status_code} {answer.text}")
    need(server.get("/health/live").status_code == 503, f"{case.name}: health does not know")


def _children(server: ServerProcess) -> str:
    tasks = Path(f"/proc/{server.process.pid}/task")
    return " ".join((task / "children").read_text() for task in tasks.iterdir() if (task / "children").exists()).strip()


def lost_rank(run: Soak) -> str:
    """There is one process; what would ask for more is refused by name."""
    environment = {**os.environ, "CHECKPOINT_PATH": str(run.model), "TP_SIZE": "2"}
    command = [sys.executable, "-m", "maga_transformer.cli", "config"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True)
    need(asked.returncode != 0, "TP_SIZE=2 is taken now: the loss of a rank is to be tried")
    need("TP_SIZE" in asked.stderr, f"not refused by its name: {asked.stderr}")
    return f"not there yet: one process serves a model ({asked.stderr.strip()})"


def shutdown(run: Soak) -> str:
    """SIGTERM at random moments under 64 streams; then a second signal. Nothing may stay behind."""
    random_, times, ends = random.Random(run.seed + 6), max(3, run.size(1) * 2), []
    shared = _shared_memory()
    settings = {"DRAIN_TIMEOUT": "30", "MAGA_FAULT": "slow:forward:1000000", "KV_CACHE_MEM_MB": "16"}
    for _ in range(times):
        with run.server(**settings) as server:
            asks = [Ask({**ask.body, "max_tokens": 6}) for ask in draw(random_, 64)]
            threading.Timer(random_.uniform(0.5, 3), server.process.send_signal, (signal.SIGTERM,)).start()
            said = say(server, asks, 64)
            need(server.process.wait(60) == 0, f"status {server.process.returncode}")
            running = [one for one in said if one.status == 200]
            lost = [one for one in running if not one.ended]
            need(not lost, f"{len(lost)} of {len(running)} streams had no end")
            ends += running
    need(ends, "no stream ran")
    with run.server(**settings) as server:
        asks = [Ask({**ask.body, "max_tokens": 60}) for ask in draw(random_, 64)]
        clients = threading.Thread(target=say, args=(server, asks, 64))
        clients.start()
        time.sleep(2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        need(server.process.poll() is None, "the first signal did not wait for the streams")
        seconds, withheld = _seconds_to_end(server)
        clients.join()
        need(seconds - withheld < 1, f"the second signal took {seconds:.1f} s; the machine withheld {withheld:.1f} s of that")
    need(_shared_memory() <= shared, f"shared memory is left: {_shared_memory() - shared}")
    return (
        f"{times} times SIGTERM: {len(ends)} running streams ended, status 0; a second signal ends all in {seconds:.2f} s, "
        f"{withheld:.2f} s of them withheld by the machine"
    )


def _seconds_to_end(server: ServerProcess) -> tuple[float, float]:
    """After one more SIGTERM, and how long of that its main thread was ready and had no core."""
    schedule = Path(f"/proc/{server.process.pid}/schedstat")
    waits = [int(schedule.read_text().split()[1]) / 1e9]
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    while server.process.poll() is None:
        need(time.monotonic() - started < 30, "the second signal did not end the server")
        with suppress(OSError, IndexError):
            waits.append(int(schedule.read_text().split()[1]) / 1e9)
        time.sleep(0.01)
    return time.monotonic() - started, waits[-1] - waits[0]


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()


def health(run: Soak) -> str:
    """No alarm while all is well: what the other goals saw, and a server that nobody asks for a while. That it turns after a fault
    is part of `faults`."""
    seconds = min(600.0, 5 * run.scale)
    with run.server(STALL_TIMEOUT="1") as server, run.watched(server):
        for _ in range(2):
            say(server, draw(random.Random(run.seed), 20), 8)
            time.sleep(seconds / 2)
    need(not run.sick and not run.alarms, f"false alarms: {run.alarms:.0f}, {run.sick[:2]}")
    return f"no false alarm in {seconds:.0f} s idle nor under any load above; stalls at {len(PHASES)} places were told by name"
