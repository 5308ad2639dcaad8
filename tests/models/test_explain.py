"""What `maga explain` prints: the program with its layers folded, and totals that add up."""

import io
import re
from pathlib import Path

import pytest
from folders import tiny_model
from maga_transformer.explain import explain
from rich.console import Console

RATES = {"bandwidth_gb": 10.0, "gflops": 100.0}


def explained(path: Path, **settings: object) -> str:
    out = io.StringIO()
    arguments = {"batch": 4, "context": 100, **RATES, **settings}
    explain(str(path), console=Console(file=out, width=200), **arguments)
    return out.getvalue()


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1].replace(",", ""))


def test_totals_of_a_tiny_model(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    text = explained(tmp_path)
    parameters = 2 * 96 * 48 + 48 + 3 * (48 * 96 + 48 * 48 + 3 * 48 * 80 + 2 * 48)
    weights = parameters - 96 * 48 + 4 * 48  # of the embedding only the rows of four tokens
    kv = 4 * 3 * (101 + 1) * 2 * 24 * 2  # read 101 entries and write one, in 3 layers, keys and values, fp16
    assert number(r"([\d.]+) kB of weights", text) == pytest.approx(weights * 4 / 1e3, abs=0.01)
    assert number(r"([\d.]+) kB of K/V moved", text) == pytest.approx(kv / 1e3, abs=0.01)
    products = 2 * 4 * (weights - 4 * 48 - 48 - 6 * 48)
    attention = 4 * 3 * 101 * 4 * (4 * 12)
    assert products + attention < number(r"([\d.]+) MFLOP:", text) * 1e6 < 1.2 * (products + attention)
    floor = number(r"at least ([\d.]+) ms", text)
    assert floor >= (weights * 4 + kv) / 10e9 * 1e3 * 0.99
    assert number(r"at most ([\d,]+) tokens/s", text) == pytest.approx(4 / floor * 1e3, rel=0.2)


def test_layers_are_folded(tmp_path: Path) -> None:
    tiny_model("qwen2", tmp_path, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    lines = explained(tmp_path).splitlines()
    headings = [line.strip() for line in lines if "times" in line]
    assert len(headings) == 2 and headings[0] == "2 times:" and headings[1].startswith("2 times, in all")
    attention = [line for line in lines if "attention " in line]
    assert len(attention) == 2 and "window 9" not in attention[0] and "window 9" in attention[1]


def test_slower_memory_takes_longer(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    floors = [number(r"at least ([\d.]+) ms", explained(tmp_path, bandwidth_gb=rate)) for rate in (0.1, 0.2)]
    assert floors[0] == pytest.approx(2 * floors[1], rel=0.05)


def test_demo_model_with_measured_rates(demo_gguf: Path) -> None:
    text = explained(demo_gguf, bandwidth_gb=None, gflops=None)
    assert "134.5 M parameters in 96.58 MB (q4_1 69%, q8_0 31%" in text
    assert "30 times:" in text and "960 x 576 q4_1" in text and "49152 x 576 q8_0" in text
    assert "GB/s (measured)" in text and number(r"at most ([\d,]+) tokens/s", text) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"context": -1}, "context is -1"),
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3', expected one of fp32, fp16, bf16, int8, fp8_e4m3, fp8_e5m2"),
        ({"gflops": float("nan")}, "gflops is nan"),
        ({"bandwidth_gb": 0}, "bandwidth_gb is 0"),
        ({"model_type": "gpt9"}, "model type 'gpt9'"),
    ],
)
def test_settings_that_are_refused(settings: dict, message: str, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    with pytest.raises(ValueError, match=message):
        explained(tmp_path, **settings)
