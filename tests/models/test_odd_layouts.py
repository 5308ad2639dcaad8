"""Odd values in what layouts beside Hugging Face's say about a model: each builds, or is refused by an error with the path."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_gguf
from folders import tiny_model
from gguf_families import CASES, write_family
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.gguf_file import GGML_TYPES, GgufFile
from maga_transformer.models import build_program
from test_megatron import CORE, args_of, write
from test_meta import PARAMS, meta_tensors
from tiny_families import NATIVE, RELAID, native

ODD = (None, -1, 0, 1, 3, True, "x", 1e300, float("nan"), [], [1], [1, "x"], {}, {"rope_type": 3}, 2**39)


def builds_or_names(path: Path, what: object) -> None:
    try:
        build_program(open_checkpoint(str(path)))
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error), what


def test_params_of_meta(tmp_path: Path) -> None:
    model = tiny_model("mistral", tmp_path / "hf")
    folder = tmp_path / "meta"
    folder.mkdir()
    torch.save(meta_tensors(model, 12), folder / "consolidated.00.pth")
    more = {"head_dim": 12, "hidden_dim": 80, "sliding_window": 9, "rope_theta": 1e4, "yarn": None, "tied_embeddings": False}
    llama = {"use_scaled_rope": True, "max_seq_len": 64, "rope_theta": 1e4}
    for params in ({**PARAMS, **more}, {**PARAMS, **llama}):
        for key in params:
            for value in ODD:
                (folder / "params.json").write_text(json.dumps({**params, key: value}))
                builds_or_names(folder, (key, value))


def test_args_of_megatron(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    more = {"use_rope_scaling": False, "rope_scaling_factor": 8, "rotary_seq_len_interpolation_factor": None, "seq_length": 64}
    args = args_of(model, **more)
    write(model, tmp_path / "m", CORE, args=args)
    file = tmp_path / "m" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for key in args:
        for value in (*ODD, Path("x"), Path, torch.float16):
            content["args"] = argparse.Namespace(**{**args, key: value})
            torch.save(content, file)
            builds_or_names(tmp_path / "m", (key, value))
    content["args"] = argparse.Namespace(**args)
    for key in ("args", "checkpoint_version", "model"):
        for value in (*ODD, Path("x")):
            torch.save({**content, key: value}, file)
            builds_or_names(tmp_path / "m", (key, value))


@pytest.mark.parametrize("case", {architecture: case for case, architecture in CASES.items()}.values())
def test_metadata_of_gguf(case: str, tmp_path: Path) -> None:
    native(case, tmp_path / "folder") if case in NATIVE else RELAID[case](tmp_path / "folder")
    file = GgufFile(str(write_family(case, tmp_path / "folder", tmp_path / "good.gguf")))
    kinds = {name: number for number, (name, _, _) in GGML_TYPES.items()}
    tensors: dict[str, Any] = {name: (file.tensor(name), kinds[tensor.dtype]) for name, tensor in file.tensors.items()}
    prefix = f"{CASES[case]}."
    metadata = {key: value for key, value in file.metadata.items() if key.startswith(prefix)}
    more = ("attention.sliding_window_pattern", "attention.clamp_kqv", "rope.scaling.type", "expert_count", "nextn_predict_layers")
    path = tmp_path / "odd.gguf"
    for key in [*metadata, *(prefix + name for name in more)]:
        for value in (0, 3, "x", 1e30, float("nan"), [1], [0, 1, 2]):
            write_gguf(path, {**metadata, key: value}, tensors, architecture=CASES[case])
            builds_or_names(path, (key, value))


def test_tensors_of_gguf_in_odd_shapes(tmp_path: Path) -> None:
    """One tensor at a time of another shape, or missing."""
    for case in ("stablelm-qk-norm", "falcon-40b", "phi3-longrope", "gpt2"):
        native(case, tmp_path / case)
        file = GgufFile(str(write_family(case, tmp_path / case, tmp_path / "good.gguf")))
        kinds = {name: number for number, (name, _, _) in GGML_TYPES.items()}
        tensors: dict[str, Any] = {name: (file.tensor(name), kinds[tensor.dtype]) for name, tensor in file.tensors.items()}
        metadata = {key: value for key, value in file.metadata.items() if key.startswith(CASES[case])}
        path = tmp_path / "odd.gguf"
        for name, (data, kind) in tensors.items():
            if ".1." in name or ".2." in name:
                continue
            for odd in (None, data[:-1], np.concatenate([data, data]), data.reshape(-1), data[None]):
                changed = {**tensors, name: (np.ascontiguousarray(odd), kind)} if odd is not None and odd.size else dict(tensors)
                if odd is None:
                    del changed[name]
                write_gguf(path, metadata, changed, architecture=CASES[case])
                builds_or_names(path, (case, name))
