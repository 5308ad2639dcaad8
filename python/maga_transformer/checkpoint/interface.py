"""What every reader offers. No reader knows how a weight is used, or how a quantised block is decoded."""

from typing import Any, Protocol

import numpy.typing as npt


class Checkpoint(Protocol):
    """A model's files. Tensors are mapped, not read, until somebody touches them."""

    path: str
    config: dict[str, Any]
    """Keys of Hugging Face's config.json, `architectures` included, whatever the files call them."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """In elements, as torch orders them: (rows, columns)."""
        ...

    def dtype(self, name: str) -> str:
        """fp64, fp32, fp16, bf16, int8, ..., or the name of a block format such as q4_1."""
        ...

    def nbytes(self, name: str) -> int: ...

    def file(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """The stored values in the tensor's shape; bf16 as uint16 bits; block formats as uint8 (..., bytes of a row)."""
        ...

    def release(self, name: str) -> None:
        """Gives back the memory that reading the tensor took; it may be read again."""
        ...

    def close(self) -> None: ...
