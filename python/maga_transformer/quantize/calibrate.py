"""What the linears of a stage see while the model reads a text, computed by the engine's own exact kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maga_transformer import _core, whole_text
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.quantize.grid import Floats
from maga_transformer.quantize.plan import Stage, View
from maga_transformer.quantize.recipe import Calibration
from maga_transformer.tokenizer import Tokenizer

_PAGE_TOKENS = 16

Ids = npt.NDArray[np.int32]


def sequences(text: str, tokenizer: Tokenizer, calibration: Calibration, context: int) -> Ids:
    """(sequences, tokens): runs of the text, evenly spread over it."""
    opening = tokenizer.opening()
    length = calibration.length
    if length > context:
        raise ValueError(f"--sample-length {length}: the model takes {context} tokens")
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    each = length - len(opening)
    count = min(calibration.samples, len(ids) // each)
    if count == 0:
        raise ValueError(f"the calibration text has {len(ids)} tokens, too few for --sample-length {length}")
    begins = np.linspace(0, len(ids) - each, count).astype(int)
    return np.stack([np.concatenate([np.asarray(opening, np.int32), ids[begin : begin + each]]) for begin in begins])


@dataclass
class Inputs:
    """Sums over all tokens of a linear's inputs x."""

    gram: Floats  # (columns, columns) of x xT
    magnitude: Floats  # (columns) of |x|
    tokens: int = 0

    def add(self, x: Floats) -> None:
        self.gram += x.T @ x
        self.magnitude += np.abs(x).sum(axis=0)
        self.tokens += len(x)


@dataclass(frozen=True)
class StageRunner:
    """Runs one stage over all sequences with the weights of `checkpoint`."""

    backend: _core.Backend
    program: _core.Program
    ids: Ids

    def values(self, stage: Stage, checkpoint: Checkpoint, before: Floats | None, wanted: list[int]) -> Iterator[dict[int, Floats]]:
        """Of each sequence the wanted values, (tokens, width). `before`: (sequences, tokens, width) of stage.input."""
        part = _core.part(self.program, stage.first, stage.last, outputs=wanted)
        weights = load_weights(self.backend, part, checkpoint)
        length = self.ids.shape[1]
        model = self.backend.load(part, weights, **whole_text.limits(length, _PAGE_TOKENS, 1), kv_dtype="fp32")
        for index, ids in enumerate(self.ids.tolist()):
            if stage.input is not None:
                assert before is not None
                model.write_value(stage.input, np.ascontiguousarray(before[index]))
            model.run(**whole_text.step(ids, _PAGE_TOKENS, [length - 1]))
            yield {value: model.read_value(value, length) for value in wanted}

    def inputs(self, stage: Stage, checkpoint: Checkpoint, before: Floats | None) -> dict[View, Inputs]:
        """What the stage's linears see."""
        views = {linear.input for linear in stage.linears}
        found = {view: Inputs(np.zeros((view[2], view[2]), np.float32), np.zeros(view[2], np.float32)) for view in views}
        for values in self.values(stage, checkpoint, before, sorted({value for value, _, _ in views})):
            for (value, first, width), inputs in found.items():
                inputs.add(values[value][:, first : first + width])
        return found

    def write(self, stage: Stage, checkpoint: Checkpoint, before: Floats | None, file: str) -> None:
        """What the stage leaves for the next one, (sequences, tokens, width), as a .npy file."""
        assert stage.output is not None
        after = None
        for index, values in enumerate(self.values(stage, checkpoint, before, [stage.output])):
            rows = values[stage.output]
            if after is None:
                after = np.lib.format.open_memmap(file, "w+", np.float32, (len(self.ids), *rows.shape))
            after[index] = rows
        assert after is not None
        after.flush()
