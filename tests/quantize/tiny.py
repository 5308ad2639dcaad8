"""Tiny models with a tokenizer, and texts that they can read."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from folders import tiny_model
from maga_transformer.quantize import Calibration, Recipe
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def model_folder(kind: str, folder: Path, **settings: Any) -> torch.nn.Module:
    """A random model of 96 tokens, each a character. Inputs differ in size from column to column, as in real models."""
    model = tiny_model(kind, folder, **{**SIZES, **settings})
    with torch.no_grad():
        size = torch.from_numpy(np.exp(np.random.default_rng(0).normal(0, 1, SIZES["hidden_size"]))).float()
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") and parameter.shape == size.shape:
                parameter.mul_(size)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(BPE(vocab={text: i for i, text in enumerate(CHARACTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def recipe(method: str, **changes: Any) -> Recipe:
    settings = {
        "method": method,
        "bits": 0,
        "group_size": 32,
        "symmetric": True,
        "act_order": "static",
        "damp": 0.01,
        "checkpoint_format": "gptq",
    }
    return Recipe(**{**settings, **changes})


def calibration(folder: Path, *, samples: int = 8, length: int = 64) -> Calibration:
    """A random text: the more of the characters' products it holds, the better."""
    file = folder / "calibration.txt"
    file.write_text("".join(np.random.default_rng(1).choice(CHARACTERS, 4096)))
    return Calibration(str(file), samples, length)
