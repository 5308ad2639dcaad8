"""Every op on every CPU instruction set of this machine, against the reference backend."""

import numpy as np
import pytest

from .case import quantize_rows
from .cases import CASES, build
from .harness import MODES, Mode, distance, expected, load, run

# fp32 arithmetic, with sums of up to about a thousand terms.
EXACT = 2e-5
# Against the reference on activations rounded the same way: nothing but fp32 sums between them, whereas a wrong scale or a
# dropped block is at least 1e-3.
ROUNDED = 1e-4
# Against the reference on activations as they are.
LOOSE = 0.1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.quantized], ids=str)
def test_exact(mode: Mode, name: str) -> None:
    case = build(name)
    assert distance(run(load(mode.backend(), case), case), expected(name, False)) < EXACT


@pytest.mark.parametrize("name", [name for name in CASES if build(name).quantized_inputs])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.quantized], ids=str)
def test_quantized_activations(mode: Mode, name: str) -> None:
    case = build(name)
    got = run(load(mode.backend(), case), case)
    assert distance(got, expected(name, True)) < ROUNDED
    assert distance(got, expected(name, False)) < LOOSE


def test_rounding_of_activations() -> None:
    """quantize_rows, by hand: a block's largest element becomes 127 steps, each rounded to nearest."""
    x = np.zeros((1, 33), np.float32)
    x[0, :4] = [-127.0, 1.4, -1.6, 126.6]
    x[0, 32] = 0.3
    got = quantize_rows(x, 32)
    assert got[0, :4].tolist() == [-127.0, 1.0, -2.0, 127.0]
    assert got[0, 32] == np.float32(0.3)
