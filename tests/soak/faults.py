"""The faults of 6.7: what happens at which place of the engine, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLACES = ("admit", "allocate", "forward", "sample", "commit", "emit")
EVERYWHERE = ("throw", "memory", "slow", "disk_full", "closed_pipe", "clock")
# Why other kinds have fewer places.
ELSEWHERE = {
    "nan": "forward only: no other place makes numbers",
    "no_pages": "allocate only: no other place takes pages",
    "child": "nowhere: the server has no child process",
}
# Where a stall is said to be, by the loop's phases.
PHASES = {
    "admit": ("admit", "plan"),
    "allocate": ("plan",),
    "forward": ("run",),
    "sample": ("choose",),
    "commit": ("commit",),
    "emit": ("emit",),
}
ERRORS = {"throw": "injected fault", "memory": "bad_alloc", "nan": "non-finite logits"}


@dataclass(frozen=True)
class Case:
    kind: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def error(self) -> str:
        """Part of what the requests concerned are told; "": none is concerned."""
        return "" if self.place == "emit" else ERRORS.get(self.kind, "")

    def settings(self, clock: Path | None) -> dict[str, str]:
        """Of a server that has it three times, but not at once; a clock jumps there and back."""
        count = {"throw": 3, "memory": 3, "slow": 1, "nan": 3, "no_pages": 9, "clock": 2}.get(self.kind, 1)
        settings = {"MAGA_FAULT": f"{self.name}:{count}" + ("" if self.place == "loop" else ":2"), "LOG_LEVEL": "INFO"}
        if self.kind == "slow":
            settings["STALL_TIMEOUT"] = "0.15"
        if self.kind == "clock":
            settings["LD_PRELOAD"] = str(clock)
        return settings


CASES = [Case(kind, place) for kind in EVERYWHERE for place in PLACES]
CASES += [Case("nan", "forward"), Case("no_pages", "allocate"), Case("throw", "loop")]
