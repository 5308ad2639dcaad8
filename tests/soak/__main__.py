"""`make soak`: the goals of reliability that a CPU can show, one row each. Ends with status 1 if one does not hold.

python tests/soak [--scale 40] [--seed 1] [--only soak,cancel]      # scale 1: CI's sizes, about three minutes; 40: full sizes
"""

import argparse
import pathlib
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]
from soak import answer_goals, fault_goals, hostile_goals, load_goals  # noqa: E402
from soak.load import write_model  # noqa: E402
from soak.run import Missed, Soak  # noqa: E402

# Of one server, one after another: number, function.
SHARED: dict[str, tuple[str, Callable[..., str]]] = {
    "soak": ("6.1", load_goals.soak),
    "hostile": ("6.5", hostile_goals.hostile),
    "books": ("6.14", answer_goals.books),
}
# With servers of their own. These measure times, one after another.
TIMED: dict[str, tuple[str, Callable[..., str]]] = {
    "load": ("6.2", load_goals.load_held),
    "overload": ("6.3", load_goals.overload),
}
# Several at once: most of them wait.
OWN: dict[str, tuple[str, Callable[..., str]]] = {
    "faults": ("6.7", fault_goals.faults),
    "cancel": ("6.4", load_goals.cancel),
    "files": ("6.6", hostile_goals.damaged),
    "ranks": ("6.8", fault_goals.lost_rank),
    "shutdown": ("6.9", fault_goals.shutdown),
    "same": ("6.10", answer_goals.same_answer),
    "nan": ("6.11", answer_goals.not_finite),
    "tenants": ("6.12", answer_goals.tenants),
    "addresses": ("6.13", hostile_goals.addresses),
}
# Of what all the others saw.
LAST: dict[str, tuple[str, Callable[..., str]]] = {
    "health": ("6.15", fault_goals.health),
    "memory": ("6.16", answer_goals.bounded),
}
GOALS = SHARED | TIMED | OWN | LAST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="how much more of everything than in CI; 40: full sizes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help=f"of {', '.join(GOALS)}")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(GOALS)
    if unknown := set(wanted) - set(GOALS):
        parser.error(f"--only {', '.join(unknown)}: valid: {', '.join(GOALS)}")
    missed = []

    def row(name: str, *about: object) -> None:
        number, goal = GOALS[name]
        started = time.monotonic()
        try:
            told, mark = goal(run, *about), "holds"
        except Missed as error:
            told, mark = str(error), "MISSED"
        except Exception:
            told, mark = traceback.format_exc(), "MISSED"
        if mark != "holds":
            missed.append(name)
        print(f"{number:4} {name:9} {mark:6} {time.monotonic() - started:6.1f} s  {told}", flush=True)

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        run = Soak(write_model(scratch / "tiny"), scratch, args.scale, args.seed)
        print(f"seed {args.seed}, scale {args.scale:g}", flush=True)
        if shared := [name for name in SHARED if name in wanted]:
            with run.server() as server:
                for name in shared:
                    row(name, server)
        for name in TIMED:
            if name in wanted:
                row(name)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(row, [name for name in OWN if name in wanted]))
        for name in LAST:
            if name in wanted:
                row(name)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    print(f"{len(wanted) - len(missed)} goals hold, {len(missed)} do not; {time.monotonic() - started:.0f} s, of a CPU {cpu:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
