"""Rope settings: every spelling of them, the context that they allow, and the refusals."""

import logging
from typing import Any

import numpy as np
import pytest
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.rope import Rope, read_rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def read(head_dim: int = 16, **config: Any) -> Rope:
    return read_rope(ModelConfig("some/folder", config), head_dim)


def test_plain_frequencies() -> None:
    rope = read(8, rope_theta=100.0)
    np.testing.assert_allclose(rope.inv_freq, [1.0, 100**-0.25, 0.1, 100**-0.75], rtol=1e-7)
    assert (rope.rotary_dim, rope.multiplier, rope.dynamic_factor) == (8, 1.0, 0.0)


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.2}, {"mscale": 2.0, "mscale_all_dim": 1.0}, {"beta_fast": 16}])
def test_spellings_of_one_setting(extra: dict) -> None:
    wanted = read(max_position_embeddings=64, rope_theta=500.0, rope_scaling={"rope_type": "yarn", **YARN, **extra})
    for config in (
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **YARN, **extra}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, **extra}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "yarn", "rope_theta": None, **YARN, **extra}},
    ):
        assert read(max_position_embeddings=64, **config) == wanted
    assert wanted != read(max_position_embeddings=64, rope_theta=500.0)


def test_original_length_from_elsewhere() -> None:
    wanted = read(max_position_embeddings=64, rope_scaling={"type": "yarn", **YARN})
    scaling = {"type": "yarn", "factor": 4.0}
    assert read(max_position_embeddings=64, rope_scaling=scaling) == wanted
    assert read(max_position_embeddings=64, original_max_position_embeddings=64, rope_scaling=scaling) == wanted
    stretched = read(max_position_embeddings=256, rope_scaling={"type": "yarn", "original_max_position_embeddings": 64})
    assert stretched.inv_freq == wanted.inv_freq  # factor = 256 / 64


@pytest.mark.parametrize(
    ("positions", "scaling", "length"),
    [
        (128, None, 128),
        (64, {"type": "yarn", **YARN}, 256),
        (1000, {"type": "yarn", **YARN}, 1000),
        (128, {"type": "linear", "factor": 2.0}, 256),
        (128, {"type": "dynamic", "factor": 2.0}, 256),
        (131072, {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
    ],
)
def test_longest_context(positions: int, scaling: dict | None, length: int) -> None:
    assert read(max_position_embeddings=positions, rope_scaling=scaling).extended_positions == length


def test_part_of_a_head() -> None:
    assert read(16, partial_rotary_factor=0.5).rotary_dim == 8
    assert read(16, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}).rotary_dim == 4


def test_keys_that_do_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 3})
    assert "rope type linear does not use the keys beta_fast" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported .supported: default, linear, dynamic, llama3, yarn."),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, r"rope_scaling\.factor is nan"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, r"rope_scaling\.factor is 0\.5, expected at least 1"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}}, "high_freq_factor is 1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs between layer types"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type .'yarn'. is not supported"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": 1}, r"rope_theta is 1\.0, expected more than 1"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
        ({"partial_rotary_factor": 0.2}, "3 rotary dimensions of a head of 16, expected an even number"),
        ({"rope_scaling": {"type": "divisors"}}, r"rope_scaling\.divisors is None, expected a list of 8 numbers"),
        ({"rope_scaling": {"type": "divisors", "divisors": [1] * 7 + ["x"]}}, r"rope_scaling\.divisors is 'x'"),
        ({"partial_rotary_factor": 2.0}, "32 rotary dimensions of a head of 16"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ],
)
def test_refusals(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(**config)
    assert "some/folder" in str(error.value)
