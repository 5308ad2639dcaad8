"""Rotary position embeddings: the frequencies of every scaling method, from config.json's keys.

Plain and linear: https://arxiv.org/abs/2104.09864 and kaiokendev's note; dynamic NTK: r/LocalLLaMA; YaRN:
https://arxiv.org/abs/2309.00071; llama3: the Llama 3.1 release; longrope: https://arxiv.org/abs/2402.13753.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.models.config import ModelConfig, positive_number

log = logging.getLogger(__name__)

Frequencies = npt.NDArray[np.float64]

_KNOWN_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "truncate", "attention_factor", "mscale", "mscale_all_dim",
    },
    "longrope": {"short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"},
    "divisors": {"divisors"},
}  # fmt: skip
_SHARED_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}


@dataclass(frozen=True)
class Rope:
    """Arguments of Program.rope_table, and the context length that the scaling makes possible."""

    rotary_dim: int
    inv_freq: list[float]
    multiplier: float
    theta: float
    dynamic_factor: float
    max_positions: int
    extended_positions: int
    interleaved: bool = False
    by_block: bool = False  # by block positions, of ChatGLM-6B
    stepped: bool = False
    long_inv_freq: tuple[float, ...] = ()


def _first(*values: Any) -> Any:
    """The first that is there; 0 is."""
    return next((value for value in values if value is not None), None)


def read_rope(config: ModelConfig, head_dim: int, *, theta: float = 10000.0) -> Rope:
    """`theta` is the family's default base. Accepts rope_theta and rope_scaling side by side, and transformers 5's
    rope_parameters dict; `type` is the old name of `rope_type`."""
    scaling = _scaling(config)
    base = positive_number(config, "rope_theta", _first(scaling.get("rope_theta"), config.get("rope_theta"), theta))
    if base <= 1:
        raise config.error("rope_theta", base, "more than 1")
    name = "partial_rotary_factor"
    partial = positive_number(config, name, _first(scaling.get(name), config.get(name), 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"{config.path}: {rotary_dim} rotary dimensions of a head of {head_dim}, expected an even number up to that"
        )
    positions = config.integer("max_position_embeddings", 2048)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):
        kind = "longrope"  # its names in the first Phi-3 models
    if not isinstance(kind, str) or kind not in _KNOWN_KEYS:
        valid = ", ".join(name for name in _KNOWN_KEYS if name != "divisors")
        raise ValueError(f"{config.path}: rope type {kind!r} is not supported (supported: {valid})")
    unknown = scaling.keys() - _KNOWN_KEYS[kind] - _SHARED_KEYS
    if unknown:
        log.warning("%s: rope type %s does not use the keys %s", config.path, kind, ", ".join(sorted(unknown)))

    plain = frequencies = base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    multiplier, dynamic_factor, extended = 1.0, 0.0, positions
    if kind == "divisors":
        frequencies = frequencies / _divisors(config, scaling, "divisors", frequencies.size)
    elif kind == "longrope":
        frequencies = frequencies / _divisors(config, scaling, "short_factor", frequencies.size)
        original = _original_positions(config, scaling)
        multiplier = _longrope_multiplier(config, scaling, positions / original, original)
        long = _as_fp32(plain / _divisors(config, scaling, "long_factor", plain.size))
        inv_freq = _as_fp32(frequencies)
        return Rope(
            rotary_dim, inv_freq, multiplier, base, 0.0, int(min(original, positions)), positions, long_inv_freq=tuple(long)
        )
    elif kind != "default":
        factor = _factor(config, scaling, positions)
        if kind == "linear":
            frequencies = frequencies / factor
            extended = int(positions * factor)
        elif kind == "dynamic":
            if rotary_dim == 2:
                raise ValueError(f"{config.path}: rope type 'dynamic' needs more than 2 rotary dimensions")
            dynamic_factor = factor
            extended = int(positions * factor)
        elif kind == "llama3":
            frequencies = _llama3(config, scaling, frequencies, factor)
        else:
            original = _original_positions(config, scaling)
            frequencies = _yarn(config, scaling, frequencies, base, factor, original)
            multiplier = _yarn_multiplier(config, scaling, factor)
            extended = max(positions, int(original * factor))
    return Rope(rotary_dim, _as_fp32(frequencies), multiplier, base, dynamic_factor, positions, extended)


def score_strength(config: ModelConfig) -> float:
    """What DeepSeek's attention multiplies its scores by where its context is scaled: the square of YaRN's `mscale_all_dim`."""
    scaling = _scaling(config)
    all_dim = scaling.get("mscale_all_dim")
    if not all_dim or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return 1.0
    factor = _factor(config, scaling, config.integer("max_position_embeddings", 2048))
    return _strength(factor, positive_number(config, "rope_scaling.mscale_all_dim", all_dim)) ** 2


def _as_fp32(frequencies: Frequencies) -> list[float]:
    values: list[float] = frequencies.astype(np.float32).astype(float).tolist()
    return values


def _scaling(config: ModelConfig) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise config.error(key, value, "an object")
        if any(isinstance(item, dict) for item in value.values()):
            raise ValueError(f"{config.path}: {key} differs between layer types, which this family does not have")
        merged.update({name: item for name, item in value.items() if item is not None})
    return merged


def _factor(config: ModelConfig, scaling: dict[str, Any], positions: int) -> float:
    if scaling.get("factor") is None and scaling.get("rope_type", scaling.get("type")) == "yarn":
        return positions / _original_positions(config, scaling)
    factor = positive_number(config, "rope_scaling.factor", scaling.get("factor"))
    if factor < 1:
        raise config.error("rope_scaling.factor", factor, "at least 1")
    return factor


def _original_positions(config: ModelConfig, scaling: dict[str, Any]) -> float:
    key = "original_max_position_embeddings"
    return positive_number(config, key, scaling.get(key) or config.get(key) or config.get("max_position_embeddings"))


def _setting(config: ModelConfig, scaling: dict[str, Any], key: str, default: float) -> float:
    value = scaling.get(key)
    return default if value is None else positive_number(config, f"rope_scaling.{key}", value)


def _divisors(config: ModelConfig, scaling: dict[str, Any], key: str, count: int) -> list[float]:
    divisors = scaling.get(key)
    if not isinstance(divisors, list) or len(divisors) != count:
        raise config.error(f"rope_scaling.{key}", divisors, f"a list of {count} numbers")
    return [positive_number(config, f"rope_scaling.{key}", divisor) for divisor in divisors]


def _longrope_multiplier(config: ModelConfig, scaling: dict[str, Any], ratio: float, original: float) -> float:
    factor = _setting(config, scaling, "factor", ratio)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return _setting(config, scaling, "attention_factor", default)


def _llama3(config: ModelConfig, scaling: dict[str, Any], frequencies: Frequencies, factor: float) -> Frequencies:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low = _setting(config, scaling, "low_freq_factor", 1.0)
    high = _setting(config, scaling, "high_freq_factor", 4.0)
    if high <= low:
        raise config.error("rope_scaling.high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    turns = _original_positions(config, scaling) * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Frequencies = (1 - kept) * frequencies / factor + kept * frequencies
    return blended


def _yarn(
    config: ModelConfig, scaling: dict[str, Any], frequencies: Frequencies, base: float, factor: float, original: float
) -> Frequencies:
    """Dimensions that turn often over the original context are kept, those that turn less than once are stretched."""
    rotary_dim = 2 * frequencies.size

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low = dimension_of(_setting(config, scaling, "beta_fast", 32.0))
    high = dimension_of(_setting(config, scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(frequencies.size) - low) / (high - low), 0.0, 1.0)
    blended: Frequencies = stretched * frequencies / factor + (1 - stretched) * frequencies
    return blended


def _yarn_multiplier(config: ModelConfig, scaling: dict[str, Any], factor: float) -> float:
    """On cos and sin, so attention scores grow by its square."""
    if scaling.get("attention_factor") is not None:
        return positive_number(config, "rope_scaling.attention_factor", scaling["attention_factor"])
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _strength(factor, positive_number(config, "rope_scaling.mscale", mscale)) / _strength(
            factor, positive_number(config, "rope_scaling.mscale_all_dim", all_dim)
        )
    return _strength(factor, 1.0)


def _strength(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
