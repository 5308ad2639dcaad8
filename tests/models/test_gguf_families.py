"""Every family that llama.cpp knows, through a GGUF file as its converter writes it: the logits are those of the original."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_families import CASES, write_family
from maga_transformer import _core
from maga_transformer.checkpoint import gguf_config, open_checkpoint
from maga_transformer.formats import read_weight
from maga_transformer.models import build_program
from runner import Runner
from tiny_families import IDS, LENGTH, NATIVE, RELAID, native

Q = gguf.GGMLQuantizationType


# What a GGUF file does not say: the family takes it from sizes that tiny models do not have.
MODEL_TYPES = {"baichuan2-7b": "baichuan2"}
# Gemma's scale of scores is by the size of a head.
SETTINGS = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16}}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    if case in SETTINGS:
        kind, settings = NATIVE[case]
        monkeypatch.setitem(NATIVE, case, (kind, {**settings, **SETTINGS[case]}))
    if case == "baichuan-13b":
        monkeypatch.setattr(gguf_config, "_BAICHUAN_13B_LAYERS", 3)
    expected = native(case, folder) if case in NATIVE else RELAID[case](folder)
    assert np.abs(expected).max() > 0.5
    checkpoint = open_checkpoint(str(write_family(case, folder, tmp_path / "m.gguf")))
    model_type = MODEL_TYPES.get(case)
    runner = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH, model_type=model_type)
    np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)
    program, family = build_program(open_checkpoint(str(folder)), model_type)
    assert (runner.family.model_type, runner.program.max_positions) == (family.model_type, program.max_positions)
    assert sorted(shape for _, _, shape in runner.program.weights) == sorted(shape for _, _, shape in program.weights)


@pytest.mark.parametrize("case", ["falcon-40b", "gpt-neox", "phi", "internlm2", "gpt2", "bloom", "glm4"])
def test_rows_of_quantised_tensors_move_whole(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    from tiny_families import TINY

    sizes = {"hidden_size": 64, "intermediate_size": 96}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setitem(TINY, name, size)
        native(case, folder) if case in NATIVE else RELAID[case](folder)
    exact = open_checkpoint(str(write_family(case, folder, tmp_path / "exact.gguf")))
    packed = open_checkpoint(str(write_family(case, folder, tmp_path / "packed.gguf", Q.Q8_0)))
    program, _ = build_program(packed)
    assert sum(packed.nbytes(name) for name in packed.names()) < sum(exact.nbytes(name) for name in exact.names()) / 3
    for _, sources, _ in program.weights:
        want, got = read_weight(exact, sources).dequantize(), read_weight(packed, sources).dequantize()
        np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() / 127)
