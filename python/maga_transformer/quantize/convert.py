"""The loop over a model's stages. What is finished lies in OUT.partial; the same command goes on where one was stopped, and OUT
appears when all is done."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maga_transformer import __version__, _core
from maga_transformer.checkpoint import Checkpoint, SafetensorsCheckpoint, open_checkpoint
from maga_transformer.checkpoint.safetensors_writer import write_safetensors
from maga_transformer.formats import open_quantized
from maga_transformer.models import build_program
from maga_transformer.progress import Progress
from maga_transformer.quantize import side_files
from maga_transformer.quantize.calibrate import Ids, StageRunner, sequences
from maga_transformer.quantize.grid import Floats
from maga_transformer.quantize.layouts import quantization_config
from maga_transformer.quantize.plan import Plan, make_plan
from maga_transformer.quantize.recipe import Calibration, Recipe
from maga_transformer.quantize.stage import StageQuantizer
from maga_transformer.texts import read_text
from maga_transformer.tokenizer import Tokenizer, load_tokenizer

_STATE = "quantize.json"


def convert(
    source: str,
    target: str,
    recipe: Recipe,
    calibration: Calibration,
    *,
    model_type: str | None = None,
    allow_requantize: bool = False,
    trust_remote_code: bool = False,
    threads: int = 0,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes the checkpoint `source`, quantised, to a new folder `target`. `trust_remote_code`: of its
    tokenizer. `progress` hears (stages done, in all). ValueError and FileNotFoundError name what is wrong."""
    if Path(target).exists():
        raise ValueError(f"{target}: it exists already; name a new folder")
    checkpoint = open_checkpoint(source)
    program, family = build_program(checkpoint, model_type)
    plan = make_plan(checkpoint, program, recipe, allow_requantize=allow_requantize)
    needs_words = recipe.calibrated or not side_files.is_hugging_face(checkpoint)
    words = load_tokenizer(None, checkpoint, trust_remote_code=trust_remote_code) if needs_words else None
    ids = _calibration_ids(words, program, calibration) if words and recipe.calibrated else None
    kept = [] if recipe.calibrated else [family.head.removesuffix(".weight")]
    config = side_files.config(checkpoint, quantization_config(recipe, kept))
    work = Path(f"{target}.partial")
    with _folder(work, source, recipe, ids):
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        backend = _core.cpu_backend(threads=threads, quantize_activations=False)
        runner = None if ids is None else StageRunner(backend, program, ids)
        _Conversion(checkpoint, plan, recipe, work, runner).run(progress)
        side_files.write(checkpoint, words, work)
        os.remove(work / _STATE)
        os.rename(work, target)


@dataclass(frozen=True)
class _Conversion:
    checkpoint: Checkpoint
    plan: Plan
    recipe: Recipe
    work: Path
    runner: StageRunner | None  # None: nothing is calibrated

    def run(self, progress: Progress) -> None:
        stages = self.plan.stages
        quantizer = StageQuantizer(self.checkpoint, self.plan.program, self.recipe, side_files.float_type(self.checkpoint))
        begin = self._begin()
        for index in range(begin, len(stages)):
            progress(index, len(stages))
            stage, shard, before = stages[index], self._shard(index), self._left(index)
            if not shard.exists():
                inputs = None if self.runner is None else self.runner.inputs(stage, self.checkpoint, before)
                write_safetensors(str(shard), quantizer.quantize(stage, inputs))
            if self.runner is not None and index + 1 < len(stages):
                after = self._left_file(index + 1)
                written = open_quantized(SafetensorsCheckpoint(str(self.work)))  # the next stage sees what this one has become
                self.runner.write(stage, written, before, f"{after}.tmp")
                os.replace(f"{after}.tmp", after)
            self._left_file(index).unlink(missing_ok=True)
            for name in stage.tensors:
                self.checkpoint.release(name)
        write_safetensors(str(self._shard(len(stages))), {name: quantizer.kept(name) for name in self.plan.rest})
        self._write_index()
        progress(len(stages), len(stages))

    def _begin(self) -> int:
        """The first stage that is not finished."""
        done = next((i for i in range(len(self.plan.stages)) if not self._shard(i).exists()), len(self.plan.stages))
        lacks_inputs = self.runner is not None and 0 < done < len(self.plan.stages) and not self._left_file(done).exists()
        return done - lacks_inputs

    def _shard(self, index: int) -> Path:
        return self.work / f"model-{index + 1:05}-of-{len(self.plan.stages) + 1:05}.safetensors"

    def _left_file(self, index: int) -> Path:
        """What the stages before this one leave for it."""
        return self.work / f"stage-{index}.npy"

    def _left(self, index: int) -> Floats | None:
        return None if self.runner is None or index == 0 else np.load(self._left_file(index), mmap_mode="r")

    def _write_index(self) -> None:
        written = SafetensorsCheckpoint(str(self.work))
        names = sorted(written.names())
        index = {
            "metadata": {"total_size": sum(written.nbytes(name) for name in names)},
            "weight_map": {name: Path(written.file(name)).name for name in names},
        }
        (self.work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _calibration_ids(words: Tokenizer, program: _core.Program, calibration: Calibration) -> Ids:
    _, text = read_text(calibration.file, "holmes")
    return sequences(text, words, calibration, program.max_positions)


@contextmanager
def _folder(work: Path, source: str, recipe: Recipe, ids: Ids | None) -> Iterator[None]:
    """OUT.partial, for one run at a time, made by one with the same settings or new."""
    tokens = "" if ids is None else hashlib.sha256(ids.tobytes()).hexdigest()
    state = {"version": __version__, "source": os.path.abspath(source), "recipe": asdict(recipe), "calibration": tokens}
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / _STATE, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{work}: another run is writing it") from None
            file.seek(0)
            text = file.read()
            if not text:
                json.dump(state, file)
                file.flush()
            elif (other := _differing(text, state)) is not None:
                raise ValueError(f"{work}: a run with another {other} has begun it; remove it, or name another folder")
            yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{work}: no space is left on the disk; make some and run the same command, it goes on from here"
        ) from None


def _differing(text: str, state: dict[str, Any]) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return "state"
    return next((key for key in state if not isinstance(found, dict) or found.get(key) != state[key]), None)
