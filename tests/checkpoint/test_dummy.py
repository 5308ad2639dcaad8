"""Dummy weights: a config.json alone becomes a model whose tensors have the right shapes, and values like trained ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import Dense
from maga_transformer.models import build_program
from maga_transformer.tokenizer import load_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "eos_token_id": [7, 8],
}
SHAPES = Path(__file__).parents[2] / "benchmarks/shapes"


def write(folder: Path, **changes: object) -> str:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("dtype, name", [(None, "bf16"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_tensors_are_what_the_program_asks_for(dtype: str | None, name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, dtype=dtype), "dummy")
    program, _ = build_program(checkpoint)
    assert len(checkpoint.names()) == sum(len(sources) for _, sources, _ in program.weights) == 2 * 9 + 3
    for tensor in checkpoint.names():
        values = checkpoint.tensor(tensor)
        assert values.shape == checkpoint.shape(tensor) and values.nbytes == checkpoint.nbytes(tensor)
        assert checkpoint.dtype(tensor) == name
        numbers = Dense(values, name).dequantize()
        if "norm" in tensor:
            assert (numbers == 1).all()
        else:
            assert abs(numbers.mean()) < 1e-3 and numbers.std() == pytest.approx(0.02, rel=0.05)
            assert len(np.unique(numbers, axis=0)) == len(numbers), "rows that are equal would tie"
    first, second = (checkpoint.tensor(f"model.layers.{layer}.mlp.up_proj.weight") for layer in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, open_like(checkpoint.path, "model.layers.0.mlp.up_proj.weight")), "the same in every process"


def open_like(path: str, tensor: str) -> np.ndarray:
    checkpoint = open_checkpoint(path, "dummy")
    build_program(checkpoint)
    return checkpoint.tensor(tensor)


def test_tied_vocabulary_is_stored_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tie_word_embeddings=True), "dummy")
    build_program(checkpoint)
    assert "lm_head.weight" not in checkpoint.names()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_program(open_checkpoint(write(tmp_path, **changes), "dummy"))


def test_a_model_without_a_tokenizer_gets_one_of_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path), "dummy")
    tokenizer = load_tokenizer(None, checkpoint)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (300, {7, 8})
    assert tokenizer.encode("aé ") == [0x61, 0xC3, 0xA9, 0x20]
    assert tokenizer.decode([0x61, 0xC3, 0xA9, 0x20, 299]) == "aé <299>"
    assert tokenizer.token_bytes()[299] == b"<299>" and tokenizer.token_bytes()[0xC3] == b"\xc3"


@pytest.mark.parametrize("name, parameters", [("llama-3-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400)])
def test_shapes_of_the_benchmarks_are_those_of_the_models(name: str, parameters: int) -> None:
    program, _ = build_program(open_checkpoint(str(SHAPES / f"{name}.json"), "dummy"))
    assert sum(int(np.prod(shape)) for _, _, shape in program.weights) == parameters
