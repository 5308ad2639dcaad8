"""`make soak`: the goals of reliability that a CPU can show, one row each. Ends with status 1 if one does not hold.

python tests/soak [--scale 40] [--seed 1] [--only soak,cancel]      # scale 1: CI's sizes, about three minutes
"""

import argparse
import pathlib
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]
import goals  # noqa: E402
from load import write_model  # noqa: E402

SHARED = ("soak", "load_held", "hostile", "same_answer", "tenants", "books", "bounded")  # of one server, in this order
OWN = ("overload", "cancel", "faults", "shutdown", "not_finite", "health")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="how much more of everything than in CI")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help=f"of {', '.join((*SHARED, *OWN))}")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [*SHARED, *OWN]
    missed = 0

    def row(name: str, *about: object) -> None:
        nonlocal missed
        if name not in wanted:
            return
        started = time.monotonic()
        try:
            told, mark = getattr(goals, name)(run, *about), "holds"
        except goals.Missed as error:
            told, mark, missed = str(error), "MISSED", missed + 1
        print(f"{name:12} {mark:7} {time.monotonic() - started:6.1f} s  {told}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run = goals.Soak(write_model(pathlib.Path(folder) / "tiny"), args.scale, args.seed)
        print(f"seed {args.seed}, scale {args.scale:g}")
        if set(SHARED) & set(wanted):
            with run.server() as server:
                for name in SHARED:
                    row(name, server)
        for name in OWN:
            row(name)
    print(f"{len(wanted) - missed} goals hold, {missed} do not")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
