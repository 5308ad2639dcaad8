"""maga_transformer: an LLM inference engine. `LLM` is the library, `maga_transformer.start_server` the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maga_transformer.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads the library on first use: the command line should start at once."""
    if name == "LLM":
        from maga_transformer.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
