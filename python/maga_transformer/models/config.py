"""Typed access to config.json: a missing, mistyped or impossible value is an error that names the key and what was found."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class ModelConfig:
    """`spellings` are a family's own names of keys, `defaults` its values of keys that are absent or null."""

    def __init__(
        self,
        path: str,
        values: dict[str, Any],
        *,
        spellings: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self._spellings = {key: own for key, own in spellings.items() if values.get(key) is None and own in values}
        self.values = {**values, **{key: values[own] for key, own in self._spellings.items()}}
        self.values.update({key: value for key, value in defaults.items() if self.values.get(key) is None})

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 40) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, value, f"an integer from {least} to {most}")
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

    def require(self, key: str, *supported: object) -> None:
        """Refuses other values of a key than those that a family can run; absent and null are the default."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            raise ValueError(
                f"{self.path}: config key {key} is {value!r}, which is not supported (supported: {', '.join(map(repr, supported))})"
            )

    def error(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.path}: config key {self._spellings.get(key, key)} is {value!r}, expected {expected}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.path}: config has no key {self._spellings.get(key, key)}")
        return value


def positive_number(config: ModelConfig, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise config.error(key, value, "a finite number above 0")
    return float(value)
