"""Every op on every CPU instruction set of this machine, against the reference backend."""

from dataclasses import replace

import numpy as np
import pytest
from maga_transformer._core import View

from .case import Case, OpProgram, Run, plain_step, quantize_rows, rows
from .cases import CASES, build
from .harness import MODES, Mode, distance, expected, load, run
from .weights import Form, stack

# fp32 arithmetic, with sums of up to about a thousand terms.
EXACT = 2e-5
# Against the reference on activations rounded the same way: nothing but fp32 sums between them, whereas a wrong scale or a
# dropped block is at least 1e-3.
ROUNDED = 1e-4
# Against the reference on activations as they are.
LOOSE = 0.1
# Where the last bit of a norm or of a rotation decides about an 8-bit code of a key. Measured: up to 4e-3.
CODES = 1e-2


def rounds_to_codes(case: Case) -> bool:
    return case.kv_dtype not in ("fp32", "fp16", "bf16") and case.program.ops[0]["op"] == "prepare_qkv"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.quantized], ids=str)
def test_exact(mode: Mode, name: str) -> None:
    case = build(name)
    assert distance(run(load(mode.backend(), case), case), expected(name, False)) < (CODES if rounds_to_codes(case) else EXACT)


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


MOE_CASES = [name for name in CASES if name.startswith("moe")]


@pytest.mark.parametrize("name", MOE_CASES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_moe_of_a_token_is_the_same_alone(mode: Mode, name: str) -> None:
    """Bit for bit."""
    case = build(name)
    (together,) = run(load(mode.backend(), case), case)
    assert distance([together], expected(name, False)) < (LOOSE if mode.quantized else EXACT)
    if case.runs[0].tokens == 1:
        return
    executable = load(mode.backend(), case)
    rng = np.random.default_rng(0)
    for token in (0, case.runs[0].tokens // 2, case.runs[0].tokens - 1):
        inputs = {value: data[token : token + 1] for value, data in case.runs[0].inputs.items()}
        (alone,) = run(executable, replace(case, runs=[Run(plain_step(1, rng) | {"pages": [0]}, inputs)]))
        for value, data in alone.items():
            np.testing.assert_array_equal(data[0], together[value][token])


@pytest.mark.parametrize("form", [Form("fp16"), Form("affine", 4, 32, True), Form("affine", 8, 32, False, 128)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_moe_is_its_linears(mode: Mode, form: Form) -> None:
    """Bit for bit: a gated linear and a linear of the one expert that a token chooses, whose weight is 1."""
    rng = np.random.default_rng(0)
    experts, width, hidden, out, tokens = 4, 96, 64, 40, 23
    gate_up, down = stack(rng, experts, 2 * hidden, width, form), stack(rng, experts, out, hidden, form)
    x, logits = rows(rng, tokens, width), rows(rng, tokens, experts)
    p = OpProgram(rng)
    sizes = {"width": hidden, "experts": experts, "top_k": 1, "renormalise": True, "kind": "silu"}
    p.program.moe(
        p.output("y", out), p.input("x", width), p.input("l", experts), gate_up=p.weight(gate_up), down=p.weight(down), **sizes
    )
    case = p.case([Run(plain_step(tokens, rng), {1: x, 2: logits})])
    (result,) = run(load(mode.backend(), case), case)
    for e in range(experts):
        p = OpProgram(rng)
        h = p.program.value("hidden", hidden)
        p.program.gated_linear(h, p.input("x", width), weight=p.weight(gate_up.matrix(e)), kind="silu")
        p.program.linear(p.output("y", out), h, weight=p.weight(down.matrix(e)))
        linears = p.case([Run(plain_step(tokens, rng), {1: x})])
        (want,) = run(load(mode.backend(), linears), linears)
        chosen = logits.argmax(1) == e
        np.testing.assert_array_equal(result[0][chosen], want[2][chosen])


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
    "moe-bf16-64x96x64-2of8-x40-renormalise1",
    "moe-4bit-g32-z0-offset-64x96x64-2of8-x40-renormalise1",
    "rope64-head64-x3-ragged",
    "attention-64-4over2-prefill-fp32-pages16",
    "prepare_qkv-64-6over2-ragged-norm-qk-rope64",
    "head_linear-bf16-4x20x12-rest8-x9",
    "attention-56-4over1-prefill-v40-fp32-pages16-in-keys",
    "attention-64-4over2-prefill-int8-pages16",
    "prepare_qkv-64-6over2-ragged-norm-qk-rope64-int8",
    "prepare_qkv-64-6over2-ragged-norm-qk-rope64-fp8_e4m3",
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
