"""Folders that PEFT saved: adapter_config.json beside adapter_model.safetensors or adapter_model.bin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.folder import TensorFile
from maga_transformer.checkpoint.safetensors import SafetensorsFile
from maga_transformer.checkpoint.torch_folder import StateDict
from maga_transformer.formats import Dense

SETTINGS = "adapter_config.json"
_FILES: dict[str, Callable[[str], TensorFile]] = {"adapter_model.safetensors": SafetensorsFile, "adapter_model.bin": StateDict}
_DTYPES = ("fp32", "fp16", "bf16")


class Adapter:
    """A folder's settings and tensors. Errors name the file."""

    def __init__(self, folder: str) -> None:
        self.settings_file = str(Path(folder) / SETTINGS)
        self.settings = read_json_object(self.settings_file)
        found = [(Path(folder) / name, reader) for name, reader in _FILES.items() if (Path(folder) / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{folder}: neither {' nor '.join(_FILES)} is here")
        path, reader = found[0]
        self.file = str(path)
        self._tensors: TensorFile = reader(self.file)

    @property
    def kind(self) -> str:
        return str(self.settings.get("peft_type"))

    def error(self, key: str, wanted: str) -> ValueError:
        return ValueError(f"{self.settings_file}: key {key} is {self.settings.get(key)!r}, expected {wanted}")

    def count(self, key: str) -> int:
        value = self.settings.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "an integer from 1")
        return value

    def only_tensor(self, name: str, rows: int) -> Dense:
        """The one tensor of the file, a matrix of so many rows."""
        names = list(self._tensors.entries)
        if names != [name]:
            raise ValueError(f"{self.file}: holds {', '.join(sorted(names)[:5]) or 'no tensors'}; expected {name} alone")
        entry = self._tensors.entries[name]
        if len(entry.shape) != 2 or entry.shape[0] != rows or entry.shape[1] == 0:
            raise ValueError(f"{self.file}: tensor {name} has shape {entry.shape}, expected ({rows}, any)")
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{self.file}: tensor {name} has the type {entry.dtype}, expected one of {', '.join(_DTYPES)}")
        return Dense(self._tensors.tensor(name), entry.dtype)

    def other_base(self, found: str, wanted: object) -> ValueError:
        """`found`: what it was tuned for; `wanted`: the model's own."""
        base = self.settings.get("base_model_name_or_path")
        tuned = f" (tuned for {base})" if base else ""
        return ValueError(f"{self.file}: has {found}, the model {wanted}: it belongs to another model{tuned}")
