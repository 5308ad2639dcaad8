"""The backends of this machine, how a case runs on one of them, and how far two results are apart."""

import functools
from dataclasses import dataclass, replace

import numpy as np
from maga_transformer import _core
from maga_transformer.formats import Float8

from .case import Case, quantize_rows
from .cases import build
from .weights import rounded

ISAS = ("generic", "avx2", "avx512", "avx512_vnni", "neon", "neon_dotprod")


@dataclass(frozen=True)
class Mode:
    """One way to run the CPU backend."""

    isa: str
    quantized: bool
    threads: int = 2

    def __str__(self) -> str:
        return f"{self.isa}-{'quantized' if self.quantized else 'exact'}"

    def backend(self) -> _core.Backend:
        return _backend(self)


@functools.cache
def _backend(mode: Mode) -> _core.Backend:
    return _core.cpu_backend(threads=mode.threads, quantize_activations=mode.quantized, isa=mode.isa)


@functools.cache
def reference() -> _core.Backend:
    return _core.reference_backend()


def _usable(isa: str) -> bool:
    try:
        _core.cpu_backend(threads=1, isa=isa)
    except ValueError:
        return False
    return True


USABLE_ISAS = ("generic", *filter(_usable, ISAS[1:]))  # a machine without generic code is an error, not a skip
MODES = [Mode(isa, quantized) for isa in USABLE_ISAS for quantized in (False, True)]

Results = list[dict[int, np.ndarray]]


def load(backend: _core.Backend, case: Case, program: _core.Program | None = None) -> _core.Executable:
    weights = [data.pack(backend, f"weight{i}") for i, data in enumerate(case.weights)]
    return backend.load(program or case.program, weights, **case.limits)


def run(executable: _core.Executable, case: Case) -> Results:
    """The outputs after each of the case's steps. They hold NaN before a step, unless they are inputs too."""
    values = executable.program.values
    results = []
    for each in case.runs:
        for value in {view.value for view in case.outputs}:
            most = case.limits["tokens" if values[value][2] == "tokens" else "logit_rows"]
            executable.write_value(value, np.full((most, values[value][1]), np.nan, np.float32))
        for value, data in each.inputs.items():
            executable.write_value(value, data)
        executable.run(**each.step)
        rows = {"tokens": each.tokens, "logits": len(each.step["logit_rows"])}
        read = {view.value: executable.read_value(view.value, rows[values[view.value][2]]) for view in case.outputs}
        results.append({view.value: read[view.value][:, view.offset : view.offset + view.width] for view in case.outputs})
    return results


@functools.cache
def expected(name: str, quantized: bool) -> Results:
    """The reference's results, with fp8 weights as the CPU holds them; `quantized`: on activations that were rounded to int8 as a
    CPU kernel rounds them."""
    case = build(name)
    case.weights = [data.rounded("bf16") if data.form.kind == "fp8" else data for data in case.weights]
    if quantized:
        case.runs = [
            replace(
                each, inputs=each.inputs | {value: quantize_rows(each.inputs[value], case.block) for value in case.quantized_inputs}
            )
            for each in case.runs
        ]
    return run(load(reference(), case), case)


def rounded_case(name: str, compute: str) -> Case:
    """The case for a card: inputs that its type holds, and pages of that type where the case asks for no other."""
    case = build(name)
    for each in case.runs:
        each.inputs = {value: rounded(data, compute) for value, data in each.inputs.items()}
    if case.kv_dtype == "fp32":
        case.kv_dtype = compute
    return case


def expected_rounded(name: str, compute: str, backend: _core.Backend) -> Results:
    """The reference's results for `rounded_case`, with weights that the card's type holds, or, where the backend multiplies fp8
    codes, with those and with activations that are rounded as it rounds them."""
    case = rounded_case(name, compute)
    if any(data.form.kind == "fp8" and not data.pack(backend, "weight").widened for data in case.weights):
        for each in case.runs:
            for view in case.fp8_inputs:
                columns = slice(view.offset, view.offset + view.width)
                each.inputs[view.value] = each.inputs[view.value].copy()
                each.inputs[view.value][:, columns] = fp8_rows(each.inputs[view.value][:, columns])
    else:
        case.weights = [data.rounded(compute) for data in case.weights]
    return run(load(reference(), case), case)


def fp8_rows(x: np.ndarray) -> np.ndarray:
    """What is left of x after rounding to e4m3 by 128 columns."""
    left = np.empty_like(x)
    for begin in range(0, x.shape[1], 128):
        part = np.ascontiguousarray(x[:, begin : begin + 128])
        codes, scale = _core.quantize_fp8(part, "fp32", name="activations")
        left[:, begin : begin + 128] = Float8(codes, (1, part.shape[1]), scale).dequantize()
    return left


def distance(got: Results, want: Results) -> float:
    """The largest difference, relative to the element plus the value's root mean square; infinite if a NaN is unmatched."""
    assert len(got) == len(want)
    worst = 0.0
    for got_values, want_values in zip(got, want, strict=True):
        assert got_values.keys() == want_values.keys()
        for value, w in want_values.items():
            g = got_values[value]
            assert g.shape == w.shape
            if not w.size:
                continue
            if not np.array_equal(np.isnan(g), np.isnan(w)):
                return float("inf")
            w = w.astype(np.float64)
            size = np.abs(w) + np.sqrt(np.mean(w**2)) + 1e-6
            worst = max(worst, float(np.nanmax(np.abs(g - w) / size)))
    return worst
