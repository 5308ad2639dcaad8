"""Progress of loading: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@contextmanager
def loading_progress() -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield _log_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("loading"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log_lines(every_seconds: float = 5.0) -> Progress:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= every_seconds:
            last = now
            log.info("loaded %d of %d MiB", done >> 20, total >> 20)

    return report
