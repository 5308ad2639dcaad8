"""`maga quantize`."""

from __future__ import annotations

from typing import Annotated

import typer


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="model folder or GGUF file")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="the new folder")],
    method: Annotated[str, typer.Option(help="gptq, awq, int8 or fp8")],
    bits: Annotated[int, typer.Option(help="of a code; 0: the method's own")] = 0,
    group_size: Annotated[int, typer.Option(help="columns that share a scale (gptq, awq); -1: all of a row")] = 128,
    symmetric: Annotated[bool, typer.Option(help="without zero points (gptq)")] = True,
    act_order: Annotated[
        str, typer.Option(help="columns with large inputs first (gptq): none, static, dynamic (desc_act)")
    ] = "static",
    damp: Annotated[float, typer.Option(help="added to the Hessian's diagonal, as a share of its mean (gptq)")] = 0.01,
    checkpoint_format: Annotated[str, typer.Option(help="gptq, or gptq_v2, whose zeros are stored as they are")] = "gptq",
    calibration: Annotated[
        str, typer.Option(metavar="FILE", help="text that the model reads; without: Sherlock Holmes (gptq, awq)")
    ] = "",
    samples: Annotated[int, typer.Option(help="sequences of that text")] = 128,
    sample_length: Annotated[int, typer.Option(help="tokens of each")] = 512,
    model_type: Annotated[str | None, typer.Option(help="model family; without: read from the checkpoint")] = None,
    allow_requantize: Annotated[bool, typer.Option("--allow-requantize", help="take weights that were rounded before")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run code of the checkpoint where its tokenizer is nothing else")
    ] = False,
    threads: Annotated[int, typer.Option(help="threads that compute; 0: one per usable core")] = 0,
) -> None:
    """Write a quantised checkpoint, in the layout of GPTQ, AWQ or compressed-tensors. A run that was stopped goes on."""
    from maga_transformer.progress import progress_bar
    from maga_transformer.quantize import Calibration, Recipe, convert

    recipe = Recipe(method, bits, group_size, symmetric, act_order, damp, checkpoint_format)
    with progress_bar("quantising") as progress:
        convert(
            source,
            target,
            recipe,
            Calibration(calibration, samples, sample_length),
            model_type=model_type,
            allow_requantize=allow_requantize,
            trust_remote_code=trust_remote_code,
            threads=threads,
            progress=progress,
        )
