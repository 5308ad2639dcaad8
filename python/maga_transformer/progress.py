"""Progress of long work: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (done, in all)


@contextmanager
def loading_progress() -> Iterator[Progress]:
    """Of bytes."""
    if not sys.stderr.isatty():
        yield _log_lines(lambda done, total: f"loaded {done >> 20} of {total >> 20} MiB")
        return
    from rich.progress import DownloadColumn

    with _bar("loading", DownloadColumn()) as progress:
        yield progress


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Of things that are counted."""
    if not sys.stderr.isatty():
        yield _log_lines(lambda done, total: f"{label}: {done} of {total}")
        return
    from rich.progress import MofNCompleteColumn

    with _bar(label, MofNCompleteColumn()) as progress:
        yield progress


@contextmanager
def _bar(label: str, amount: object) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    assert isinstance(amount, ProgressColumn)
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), amount, TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log_lines(text: Callable[[int, int], str], every_seconds: float = 5.0) -> Progress:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= every_seconds:
            last = now
            log.info("%s", text(done, total))

    return report
