"""The precision of the K/V cache: its names, the scales that a checkpoint states, and a choice by measuring what it costs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maga_transformer import _core, whole_text
from maga_transformer.checkpoint import Checkpoint, Source
from maga_transformer.formats.quantized import floats

log = logging.getLogger(__name__)

KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")

# What `adaptive` measures on: prose, numbers, code.
CALIBRATION_TEXT = """In the spring of 1848 the two engineers measured the river again: 412 feet at the old ferry, 380 below it.
"If the pier stands here," she wrote, "the current will do our digging for us." def mean(values): return sum(values) / len(values)
Nobody answered her letter for eleven weeks, and by then the ice had taken the mill and most of what they knew."""
CALIBRATION_TOKENS = 96

# Of the keys' and of the values' scale, beside an attention's linears; the last is for both.
_SCALES = (
    ("attn.k_scale", "attn.v_scale"),
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
)


def state_scales(program: _core.Program, checkpoint: Checkpoint) -> int:
    """Gives the cache layers the scales that their checkpoint has for keys and values in fp8_e4m3; how many have some. Each head
    of a token gets a scale of its own where there are none, or none that is positive."""
    names, found = set(checkpoint.names()), 0
    linear = -1
    for op in program.ops:
        if op["op"] == "linear":
            linear = op["weight"]
        elif op["op"] == "attention" and linear >= 0:
            tensor = Source.parse(program.weights[linear][1][0]).tensor
            module = tensor.removesuffix(".weight").rpartition(".")[0]
            for places in _SCALES:
                k, v = (f"{module}.{place}" for place in places)
                if k in names and v in names:
                    scales = [_scale(checkpoint, name) for name in (k, v)]
                    program.state_scales(op["layer"], *scales)
                    found += any(scales)
                    break
    return found


def _scale(checkpoint: Checkpoint, name: str) -> float:
    """A single number; 0 where it is none, or stands for none."""
    shape = checkpoint.shape(name)
    if shape not in ((), (1,)):
        return 0.0
    value = float(floats(checkpoint, name, shape).reshape(-1)[0])
    return value if 0 < value < float("inf") else 0.0


@dataclass(frozen=True)
class Choice:
    dtypes: list[str]  # of each cache layer
    error: float  # of the logits, against those with `wide` in all layers


def choose_dtypes(logits: Callable[[list[str]], npt.NDArray[np.float32]], layers: int, wide: str, budget: float) -> Choice:
    """As many layers in 8 bits as leave the logits of a text within `budget`: the root mean square of their differences, relative
    to that of the logits themselves, both without each row's mean, which no probability depends on.

    `logits` runs the text with these types. Layers whose 8 bits cost least come first: errors of layers add up like independent
    ones, nearly, and the choice is measured as a whole before it is taken."""
    reference = logits([wide] * layers)

    def error(dtypes: list[str]) -> float:
        return relative_error(logits(dtypes), reference)

    def alone(layer: int, dtype: str) -> float:
        return error([dtype if i == layer else wide for i in range(layers)])

    all_int8 = ["int8"] * layers
    if (whole := error(all_int8)) <= budget:
        return Choice(all_int8, whole)
    # int8 rounds finer, fp8 bears heads whose elements differ much in size.
    costs = [min((alone(layer, dtype), dtype) for dtype in ("int8", "fp8_e4m3")) for layer in range(layers)]
    order = sorted(range(layers), key=lambda layer: costs[layer][0])
    chosen, squares, taken = [wide] * layers, 0.0, []
    for layer in order:
        squares += costs[layer][0] ** 2
        if squares > budget**2:
            break
        chosen[layer] = costs[layer][1]
        taken.append(layer)
    while (whole := error(chosen) if taken else 0.0) > budget:
        chosen[taken.pop()] = wide
    return Choice(chosen, whole)


def relative_error(values: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """Of rows, each without its mean."""
    a, b = (rows.astype(np.float64) - rows.mean(axis=1, keepdims=True, dtype=np.float64) for rows in (values, reference))
    size = float(np.sqrt(np.mean(b**2)))
    return float(np.sqrt(np.mean((a - b) ** 2))) / size if size else float(not np.array_equal(a, b))


def logits_of(
    backend: _core.Backend,
    program: _core.Program,
    weights: Sequence[_core.Weight],
    ids: Sequence[int],
    page_tokens: int,
    dtypes: list[str],
) -> npt.NDArray[np.float32]:
    """Of a text, all of it in one step; of a model that embeds or scores, what it says of the text."""
    count = len(ids)
    rows = [count - 1] if program.embeds else list(range(count))
    executable = backend.load(program, weights, **whole_text.limits(count, page_tokens, len(rows)), kv_dtype=dtypes)
    end, _, whole = program.context
    context = {"context": [count if whole else 0], "block_positions": [0] * count} if end >= 0 or whole else {}
    executable.run(**whole_text.step(ids, page_tokens, rows), prompt_length=[count], **context)
    return np.array(executable.logits())


def summary(dtypes: Sequence[str]) -> str:
    """ "int8", or "int8 in 20 layers, fp16 in 2"."""
    counts = Counter(dtypes)
    if len(counts) == 1:
        return dtypes[0]
    return ", ".join(f"{dtype} in {count} layers" for dtype, count in counts.most_common())
