"""What the routes share: the runtime, the thread pool for tokenising, the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from maga_transformer.runtime import Runtime
from maga_transformer.server.metrics import Metrics

if TYPE_CHECKING:
    from maga_transformer.server.status import StallWatch


@dataclass(frozen=True)
class State:
    runtime: Runtime
    tokenising: ThreadPoolExecutor
    metrics: Metrics
    stall_watch: StallWatch
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def of(request: Request) -> State:
        state = request.app.state.maga
        assert isinstance(state, State)
        return state

    @property
    def body_limit(self) -> int:
        return self.runtime.config.max_body_mb << 20

    @property
    def names(self) -> Sequence[str]:
        return self.runtime.description.names
