"""Typed access to config.json: a missing, mistyped or impossible value is an error that names the key and what was found."""

import math
from typing import Any


class ModelConfig:
    def __init__(self, path: str, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
            raise self.error(key, value, f"an integer from {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return positive_number(self, key, self._present(key, default))

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def error(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.path}: config key {key} is {value!r}, expected {expected}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.path}: config has no key {key}")
        return value


def positive_number(config: ModelConfig, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise config.error(key, value, "a finite number above 0")
    return float(value)
