"""Every op on every CPU instruction set of this machine, against the reference backend."""

import numpy as np
import pytest
from maga_transformer._core import View

from .case import OpProgram, quantize_rows
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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("gated_linear")])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gated_linear_is_linear_and_activation(mode: Mode, name: str) -> None:
    """Bit for bit, so that fusing changes no result."""
    case = build(name)
    (op,) = case.program.ops
    (_, width, _), (_, out, _) = case.program.values
    p = OpProgram(np.random.default_rng(0))
    x, y, both = p.input("x", width), p.output("y", out), p.program.value("both", 2 * out, "tokens")
    for data in case.weights:
        p.weight(data)
    p.program.linear(both, x, weight=op["weight"], bias=op.get("bias", -1))
    p.program.activation(y, View(both.value, 0, out), View(both.value, out, out), kind=op["kind"])
    unfused = p.case(case.runs)
    (fused_results,), (results,) = (run(load(mode.backend(), c), c) for c in (case, unfused))
    np.testing.assert_array_equal(fused_results[y.value], results[y.value])


# One case of each op and kind of weight, with several tokens.
NAN_CASES = [
    "norm-rms-100-by100-x33",
    "norm-layer-100-by100-x33-bias",
    "activation-silu-1000-x7",
    "activation-gelu-1000-x7",
    "activation-gelu_tanh-1000-x7",
    "activation-relu-1000-x7",
    "activation-relu2-1000-x7",
    "norm-layer-768-by256-x5-bias-own-weight",
    "bound-clamp1.5-1000-x7",
    "bound-tanh30-1000-x7",
    "add_positions-fp32-96-ragged-offset0",
    "log_scale-64-ragged-from16",
    "add-577-x20",
    "linear-fp32-67x129-x40",
    "linear-bf16-67x129-x40",
    "linear-4bit-g32-z0-offset-37x96-x6-bias",
    "linear-8bit-g32-z128-37x96-x6-bias",
    "gated_linear-4bit-g32-z0-offset-33x160-x5-gelu_tanh-bias",
    "rope64-head64-x3-ragged",
    "attention-64-4over2-prefill-fp32-pages16",
    "prepare_qkv-64-6over2-ragged-norm-qk-rope64",
]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAN_CASES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_bad_number_stays_visible_and_in_its_sequence(mode: Mode, name: str, bad: float) -> None:
    """An element that is not finite spoils its own token (in attention also later ones of its sequence), and nothing else."""
    case = build(name)
    good = run(load(mode.backend(), case), case)[-1]
    last = case.runs[-1]
    token = 1 if len(last.step["kv_length"]) == 1 else last.step["sequence_start"][4]  # of a sequence of one token
    value = min(last.inputs)
    last.inputs[value][token, 3] = bad
    got = run(load(mode.backend(), case), case)[-1]
    attends = any(op["op"] == "attention" for op in case.program.ops)
    others = [t for t in range(last.tokens) if t < token or (t > token and (not attends or len(last.step["kv_length"]) > 1))]
    if not (name.startswith(("activation", "add", "bound")) and bad != np.nan):  # those may turn an infinity into a number
        assert not np.isfinite(got[max(got)][token]).all()
    for result, want in zip(got.values(), good.values(), strict=True):
        np.testing.assert_array_equal(result[others], want[others])


def test_rounding_of_activations() -> None:
    """quantize_rows, by hand: a block's largest element becomes 127 steps, each rounded to nearest."""
    x = np.zeros((1, 33), np.float32)
    x[0, :4] = [-127.0, 1.4, -1.6, 126.6]
    x[0, 32] = 0.3
    got = quantize_rows(x, 32)
    assert got[0, :4].tolist() == [-127.0, 1.0, -2.0, 127.0]
    assert got[0, 32] == np.float32(0.3)
