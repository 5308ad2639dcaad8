"""Keys and values of virtual tokens, which every layer sees before a prompt's: PEFT's prefix tuning
(https://arxiv.org/abs/2101.00190), and P-Tuning v2 as ChatGLM has it (`transformer.prefix_encoder`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from maga_transformer import _core
from maga_transformer.adapters.peft import Adapter
from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.torch_folder import StateDict, torch_files
from maga_transformer.formats import Dense
from maga_transformer.models import Family

KINDS = ("PREFIX_TUNING",)
_ENCODER = "transformer.prefix_encoder."

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class KvPrefix:
    file: str
    entries: Array  # (tokens, keys of layer 0, values of layer 0, keys of layer 1, ...)
    has_positions: bool  # whether prompts have the positions behind it
    tuned_for: str = ""
    in_pages: ClassVar[bool] = True

    @property
    def tokens(self) -> int:
        return int(self.entries.shape[0])

    def check(self, program: _core.Program, family: Family) -> None:
        """ValueError where it was tuned for another model than the program's."""
        if not self.has_positions and not family.model_type.startswith("chatglm"):
            raise ValueError(f"{self.file}: {_ENCODER[:-1]} is ChatGLM's, the model is of type {family.model_type!r}")
        if family.latent:
            raise ValueError(
                f"{self.file}: tuned keys and values cannot be given to a model of type {family.model_type!r}, which keeps latent "
                "states in their place; valid: prompt tuning or P-tuning"
            )
        wanted = 2 * sum(heads * width for heads, width in _layers(program))
        found = self.entries.shape[1]
        if found != wanted:
            tuned = f" (tuned for {self.tuned_for})" if self.tuned_for else ""
            raise ValueError(
                f"{self.file}: has keys and values of {found} numbers, the model of {wanted}: it belongs to another model{tuned}"
            )

    def add_to(self, program: _core.Program, backend: _core.Backend) -> list[_core.Weight]:
        return []

    def fill(self, model: _core.Executable, program: _core.Program) -> None:
        """Writes it into the model's first pages."""
        at = 0
        for layer, (heads, width) in enumerate(_layers(program)):
            size = heads * width
            keys, values = (self.entries[:, at + i * size : at + (i + 1) * size] for i in (0, 1))
            model.fill_pages(layer, np.ascontiguousarray(keys), np.ascontiguousarray(values))
            at += 2 * size

    @staticmethod
    def read(adapter: Adapter) -> KvPrefix:
        """A projection was applied when PEFT saved it."""
        entries = adapter.only_tensor("prompt_embeddings", adapter.count("num_virtual_tokens")).dequantize()
        return KvPrefix(adapter.file, entries, True, str(adapter.settings.get("base_model_name_or_path") or ""))

    @staticmethod
    def read_encoder(folder: str) -> KvPrefix | None:
        """ChatGLM's layout: a .bin that holds the encoder alone. None: the folder has no such file."""
        files = torch_files(folder)
        if not files:
            return None
        config = Path(folder) / "config.json"
        return _encoded(StateDict(files[0]), read_json_object(str(config)) if config.is_file() else {})


def _encoded(file: StateDict, config: dict[str, object]) -> KvPrefix:
    projected = config.get("prefix_projection") is True
    names = ["embedding.weight"]
    if projected:
        names += [f"trans.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    expected = {_ENCODER + name for name in names}
    if set(file.entries) != expected:
        found = ", ".join(sorted(file.entries)[:5])
        raise ValueError(
            f"{file.path}: holds {found}; with prefix_projection={projected} it must hold {', '.join(sorted(expected))}"
        )
    tensors = {name: _matrix(file, _ENCODER + name) for name in names}
    entries = tensors["embedding.weight"]
    tokens = config.get("pre_seq_len", len(entries))
    if entries.ndim != 2 or not 0 < len(entries) == tokens:
        raise ValueError(f"{file.path}: the embedding has shape {entries.shape}, pre_seq_len in config.json is {tokens!r}")
    if projected:
        try:
            hidden = np.tanh(entries @ tensors["trans.0.weight"].T + tensors["trans.0.bias"])
            entries = hidden @ tensors["trans.2.weight"].T + tensors["trans.2.bias"]
        except ValueError as error:
            raise ValueError(f"{file.path}: the shapes of the projection do not fit: {error}") from None
    return KvPrefix(file.path, entries, False)


def _matrix(file: StateDict, name: str) -> Array:
    dtype = file.entries[name].dtype
    if dtype not in ("fp32", "fp16", "bf16"):
        raise ValueError(f"{file.path}: tensor {name} has the type {dtype}")
    return Dense(file.tensor(name), dtype).dequantize()


def _layers(program: _core.Program) -> list[tuple[int, int]]:
    """K/V heads and their width, by layer of the K/V cache."""
    layers = {op["layer"]: (op["kv_heads"], op["head_dim"]) for op in program.ops if op["op"] == "attention"}
    return [layers[layer] for layer in sorted(layers)]
