"""BERT, RoBERTa and XLM-R through GGUF, as llama.cpp's converter writes them: vectors and scores are those of the original."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import write_gguf
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program
from runner import embedded
from safetensors.numpy import load_file
from tiny_embedders import TEXTS, pooled, scored, tiny

Q = gguf.GGMLQuantizationType
KINDS = ["bert", "roberta", "xlm-roberta", "nomic-bert"]
POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}


def write(folder: Path, path: Path, *, flat: bool = False, quantize: Q | None = None, **metadata: Any) -> Path:
    """`flat`: matrices of one row lose it, as they do where llama.cpp writes a file itself."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config["model_type"] == "nomic_bert"
    cut = config["pad_token_id"] + 1 if config["model_type"] not in ("bert", "nomic_bert") else 0
    architecture = "nomic-bert" if rotary else "bert"
    kind = gguf.MODEL_ARCH.NOMIC_BERT if rotary else gguf.MODEL_ARCH.BERT
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stored: dict[str, tuple[np.ndarray, Q]] = {}
    for name, data in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("bert.").removeprefix("roberta.")
        if "pooler" in own:
            continue
        if own == "embeddings.position_embeddings.weight":
            data = data[cut:]
        if flat and len(data) == 1:
            data = data.reshape(-1)
        found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert found, own
        packed = quantize is not None and data.ndim == 2 and found.startswith("blk")
        stored[found] = (gguf.quants.quantize(data, quantize), quantize) if packed else (np.ascontiguousarray(data), Q.F32)
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"] - cut,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": float(config["layer_norm_eps"]),
        "attention.causal": False,
        **({"rope.freq_base": config["rope_parameters"]["rope_theta"]} if rotary else {}),
        **metadata,
    }
    return write_gguf(path, {f"{architecture}.{key}": value for key, value in keys.items()}, stored, architecture=architecture)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, pooling: str, tmp_path: Path) -> None:
    expected = pooled(tiny(kind, "Model", tmp_path / "folder"), pooling)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    checkpoint = open_checkpoint(str(write(tmp_path / "folder", tmp_path / "m.gguf", pooling_type=POOLINGS[pooling])))
    program, family = build_program(checkpoint)
    found = embedded(_core.reference_backend(), checkpoint, TEXTS)
    assert family.task.normalize
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    original, _ = build_program(open_checkpoint(str(tmp_path / "folder")))
    assert program.max_positions == original.max_positions


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_scores(kind: str, labels: int, tmp_path: Path) -> None:
    expected = scored(tiny(kind, "ForSequenceClassification", tmp_path / "folder", num_labels=labels))
    for flat in (False, True):
        path = write(tmp_path / "folder", tmp_path / f"{flat}.gguf", flat=flat, pooling_type=4)
        found = embedded(_core.reference_backend(), open_checkpoint(str(path)), TEXTS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_quantised(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    expected = pooled(tiny("bert", "Model", tmp_path / "folder", **sizes), "mean")
    path = write(tmp_path / "folder", tmp_path / "m.gguf", quantize=Q.Q8_0, context_length=4096)  # more than there are positions
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.dtype("bert.encoder.layer.1.output.dense.weight") == "q8_0"
    found = embedded(_core.cpu_backend(threads=1, quantize_activations=False), checkpoint, TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    tiny("bert", "ForSequenceClassification", tmp_path / "scores")  # the converter drops BERT's pooler
    with pytest.raises(ValueError, match=r"m\.gguf: tensor bert\.pooler\.dense\.weight is missing"):
        build_program(open_checkpoint(str(write(tmp_path / "scores", tmp_path / "m.gguf"))))
    tiny("bert", "Model", tmp_path / "causal")
    with pytest.raises(ValueError, match="config key is_decoder is True, which is not supported"):
        build_program(open_checkpoint(str(write(tmp_path / "causal", tmp_path / "m.gguf", **{"attention.causal": True}))))
