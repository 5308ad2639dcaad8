"""What the routes share: the runtime, the thread pool for tokenising, the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from maga_transformer.chat.dialect import Dialect
from maga_transformer.runtime import Runtime
from maga_transformer.server.metrics import Metrics

if TYPE_CHECKING:
    from maga_transformer.server.auth import Keys
    from maga_transformer.server.generation import Generation
    from maga_transformer.server.watchdog import Watchdog


@dataclass(frozen=True)
class State:
    runtime: Runtime
    tokenising: ThreadPoolExecutor
    metrics: Metrics
    watchdog: Watchdog
    dialect: Dialect
    keys: Keys
    document: Callable[[], bytes]  # /openapi.json
    kobold: dict[str, Generation] = field(default_factory=dict)  # running requests of /api, by their genkey
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def of(request: Request) -> State:
        state = request.app.state.maga
        assert isinstance(state, State)
        return state

    @property
    def reasoning_keys(self) -> Sequence[str]:
        """The names under which thoughts are given out: clients know either."""
        chosen = self.runtime.config.reasoning_field
        return ("reasoning_content", "reasoning") if chosen == "both" else () if chosen == "none" else (chosen,)

    @property
    def body_limit(self) -> int:
        return self.runtime.config.max_body_mb << 20

    @property
    def names(self) -> Sequence[str]:
        return self.runtime.description.names
