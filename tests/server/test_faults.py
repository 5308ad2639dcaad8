"""A server that meets faults (tests/soak/faults.py): what its clients, its health and its exit status tell. All places of all kinds
are the matter of tests/engine/test_faults.py and of `make soak`."""

import pytest
from soak.clock import jumping_clock
from soak.fault_goals import fault_load, survived
from soak.faults import Case
from soak.load import write_model
from soak.run import SETTINGS, all_well, say, stop

from .conftest import running_server

SMALL = {**SETTINGS, "KV_CACHE_MEM_MB": "4"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture(scope="module")
def right(model):
    """What each request of the load is answered by a whole server; which ends well, though grammars have run."""
    with running_server(model, **SMALL) as server:
        said = say(server, fault_load(1), 8)
        all_well(said)
        assert stop(server) == 0
    return said


@pytest.mark.parametrize(
    "kind, place",
    [
        ("throw", "admit"),
        ("memory", "commit"),
        ("slow", "sample"),
        ("nan", "forward"),
        ("no_pages", "allocate"),
        ("disk_full", "forward"),
        ("closed_pipe", "emit"),
        ("clock", "sample"),
        ("throw", "loop"),
    ],
)
def test_a_fault(kind, place, model, right, tmp_path):
    case, clock = Case(kind, place), jumping_clock(tmp_path) if kind == "clock" else None
    if kind == "clock" and clock is None:
        pytest.skip("no C compiler to build a clock that jumps")
    with running_server(model, **SMALL, **case.settings(clock)) as server:
        survived(server, case, [one.ask for one in right], right)
