"""What the tests that draw bodies share: a tiny model, few tokens, and no mercy."""

import collections

from hypothesis import HealthCheck, settings
from maga_transformer.server.health import ready
from maga_transformer.server.routes import routes

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
# Health takes no body.
POSTED = sorted({route.path for route in routes(generates=True) if "POST" in route.methods and route.endpoint is not ready})


class Tally(collections.Counter):
    """Of answers by their status."""

    def add(self, status: int) -> None:
        self[status] += 1

    def show(self, path: str) -> None:
        print(f"{path}: " + ", ".join(f"{count} x {status}" for status, count in sorted(self.items())))
