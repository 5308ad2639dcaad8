"""`maga serve`."""

from __future__ import annotations

from maga_transformer.cli.options import File, Path, load


def serve(path: Path = None, config: File = "", *, settings: dict[str, object]) -> None:
    """Serve a model over HTTP: RTP-LLM's POST /, OpenAI's, Anthropic's and KoboldAI's routes, /health, /metrics, a page at /."""
    loaded = load(path, config, settings)  # a mistake is told before the slow imports
    from maga_transformer.server.serve import serve

    serve(loaded)
