"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
from simulation import World


@pytest.fixture(scope="module", params=["sync", "async"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The fake model runs each step at once, or later and apart from the loop, which then plans one step ahead."""
    World.asynchronous = request.param == "async"
    yield request.param
    World.asynchronous = False
