"""maga_transformer: an LLM inference engine. `LLM` is the library, `maga_transformer.start_server` the server."""

__version__ = "0.1.0"
