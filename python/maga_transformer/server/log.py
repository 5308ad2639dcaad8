"""The log: lines of text or of JSON, each with the request it is about, none with a prompt or an output."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maga_transformer.config import Config

if TYPE_CHECKING:
    from maga_transformer.server.generation import Generation


@dataclass
class RequestRecord:
    """What is told of a request when it has ended. The door makes it, and what runs behind the door finds it in `current`."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    error: str = ""
    left: bool = False  # by the client, before the answer was whole
    generations: list[Generation] = field(default_factory=list)

    @property
    def reached_the_engine(self) -> bool:
        return any(one.submitted for one in self.generations)

    @property
    def outcome(self) -> str:
        """One of metrics.OUTCOMES."""
        if self.left:
            return "cancelled"
        if not self.error:
            return "finished"
        return "failed" if self.reached_the_engine else "rejected"

    def fields(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": _ms(time.monotonic() - self.started),
        }
        if self.error:
            told["error"] = self.error
        events = [event for one in self.generations for events in one.last_events for event in events if event is not None]
        if self.generations:
            told["prompt_tokens"] = sum(len(job.prompt) for one in self.generations for job in one.jobs)
            told["cached_tokens"] = sum(event.cached_tokens for event in events)
            told["output_tokens"] = sum(event.output_tokens for event in events)
        if events:
            told["finish"] = ",".join(sorted({event.finish or "left" for event in events}))
            told["queue_ms"] = _ms(max(event.wait_seconds for event in events))
            told["first_token_ms"] = _ms(max(event.first_token_seconds for event in events))
        return told


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def log_request(log: logging.Logger, record: RequestRecord) -> dict[str, Any]:
    """One line at the end of a request. Returns what it told."""
    fields = record.fields()
    if log.isEnabledFor(logging.INFO):
        more = " ".join(f"{name}={value}" for name, value in list(fields.items())[5:])
        head = f"{record.id} {record.method} {record.path} {record.status} {fields['ms']:.1f} ms"
        log.info("%s", f"{head} {more}".rstrip(), extra={"request": fields})
    return fields


def configure(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if config.log_format == "json" else _Text())
    level = config.log_level or ("INFO" if config.ft_server_test else "WARNING")
    logging.basicConfig(level=level, handlers=[handler])


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request = super().formatMessage(record), current.get()
        return f"{line} [request {request.id}]" if request and not hasattr(record, "request") else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
        }
        if hasattr(record, "request"):
            line |= record.request
        else:
            line["message"] = record.getMessage()
            request = current.get()
            if request:
                line["id"] = request.id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
