"""`maga config` and `maga explain`: what would run, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from maga_transformer.cli.options import File, Path, load, shown
from maga_transformer.config import Config, groups, ineffective_settings, public_value


def explain(
    path: Annotated[str, typer.Argument(help="model folder or GGUF file")],
    batch: Annotated[int, typer.Option(min=1, help="sequences of the step")] = 1,
    context: Annotated[int, typer.Option(min=0, help="tokens each sequence has before it")] = 512,
    model_type: Annotated[str | None, typer.Option(help="model family; without: read from the checkpoint")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="element type of keys and values")] = "fp16",
    bandwidth_gb: Annotated[float | None, typer.Option(help="GB/s of memory; without: measured on this machine")] = None,
    gflops: Annotated[float | None, typer.Option(help="GFLOP/s; without: measured on this machine")] = None,
) -> None:
    """Print the model as a program: ops, shapes, bytes, FLOPs, and the least time a decode step can take."""
    from rich.console import Console

    from maga_transformer.explain import explain

    explain(
        path,
        batch=batch,
        context=context,
        model_type=model_type,
        kv_dtype=kv_cache_dtype,
        bandwidth_gb=bandwidth_gb,
        gflops=gflops,
        console=Console(width=160),  # a table is never cut; it is narrower than this
    )


def config(path: Path = None, config: File = "", *, settings: dict[str, object]) -> None:
    """Print every setting with its value and where it came from: a flag, the environment, the YAML file, or its default."""
    loaded = load(path, config, settings)
    width = max(map(len, Config.model_fields)) + 1
    for title, fields in groups().items():
        print(f"# {title}")
        for name, field in fields.items():
            value = shown(public_value(loaded, name))
            print(f"{name:{width}} {value:24} {loaded.sources.get(name, 'default'):32} {field.description}")
    names = ineffective_settings()
    if names:
        print(f"# Without effect here\n{', '.join(names)}")
