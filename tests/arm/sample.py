"""A pytest plugin: of tests whose names differ in numbers only (sizes, bits), it leaves the first and every sixth after it."""

import re
from collections import Counter

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        kind = re.sub(r"\d+", "", item.nodeid)
        (left_out if seen[kind] % 6 else kept).append(item)
        seen[kind] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
