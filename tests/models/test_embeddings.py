"""Encoders and decoders that embed or score give the vectors and logits of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from folders import TINY
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program
from runner import Part, Runner

RNG = np.random.default_rng(5)
TEXTS = [RNG.integers(3, 96, n).tolist() for n in (1, 40, 17, 33)]
ENCODER = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-relu": ("Bert", {"hidden_act": "relu", "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "llama": ("Llama", {"num_key_value_heads": 2}),
}
BACKENDS = {
    "reference": lambda: _core.reference_backend(),
    "cpu": lambda: _core.cpu_backend(threads=2, quantize_activations=False),
}


def tiny(kind: str, suffix: str, folder: Path, **settings: Any) -> Any:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**{**ENCODER, "pad_token_id": 0, **own, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, name + suffix)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.5)
    model.save_pretrained(folder)
    return model


def sentence_transformer(folder: Path, pooling: str, *, normalize: bool = False) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    if normalize:
        modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens", "pooling_mode_lasttoken")
    (folder / "1_Pooling/config.json").write_text(json.dumps({mode: mode == pooling for mode in modes}))


def rows(folder: Path, backend: _core.Backend, texts: list[list[int]]) -> np.ndarray:
    """All texts in one step."""
    runner = Runner(backend, open_checkpoint(str(folder)), length=64, tokens=256, sequences=len(texts))
    assert runner.program.embeds
    parts = [Part(i, ids, 0, len(ids), [len(ids) - 1]) for i, ids in enumerate(texts)]
    return runner.step(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", ["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, pooling: str, backend: str, tmp_path: Path) -> None:
    model = tiny(kind, "Model", tmp_path)
    sentence_transformer(tmp_path, pooling)
    expected = []
    for ids in TEXTS:
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        expected.append(hidden[0] if "cls" in pooling else hidden[-1] if "last" in pooling else hidden.mean(0))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(rows(tmp_path, BACKENDS[backend](), TEXTS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_scores(kind: str, labels: int, backend: str, tmp_path: Path) -> None:
    model = tiny(kind, "ForSequenceClassification", tmp_path, num_labels=labels)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].numpy() for ids in TEXTS]
    found = rows(tmp_path, BACKENDS[backend](), TEXTS)
    assert found.shape == (len(TEXTS), labels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("suffix", ["ForMaskedLM", "Model"])
def test_what_a_checkpoint_has_besides_is_left_out(suffix: str, tmp_path: Path) -> None:
    tiny("bert", suffix, tmp_path)
    program, family = build_program(open_checkpoint(str(tmp_path)))
    assert program.embeds and family.task.pooling == "mean"


def test_tasks_that_a_checkpoint_cannot_do(tmp_path: Path) -> None:
    tiny("bert", "Model", tmp_path / "bert")
    tiny("qwen2", "ForCausalLM", tmp_path / "qwen2")
    tiny("qwen2", "ForSequenceClassification", tmp_path / "scores")
    for folder, task, why in (
        ("bert", "generate", "BertModel does not generate text; valid: TASK=embed or score"),
        ("bert", "score", "BertModel has no head for scores"),
        ("qwen2", "score", "Qwen2ForCausalLM has no head for scores"),
        ("scores", "embed", "Qwen2ForSequenceClassification gives scores, not embeddings"),
    ):
        with pytest.raises(ValueError, match=why):
            build_program(open_checkpoint(str(tmp_path / folder)), task=task)
    program, family = build_program(open_checkpoint(str(tmp_path / "qwen2")), task="embed")
    assert (
        program.embeds and family.task.pooling == "last" and not build_program(open_checkpoint(str(tmp_path / "qwen2")))[0].embeds
    )


def test_modules_that_are_not_supported(tmp_path: Path) -> None:
    tiny("bert", "Model", tmp_path)
    sentence_transformer(tmp_path, "pooling_mode_max_tokens")
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: pooling pooling_mode_max_tokens is not supported"):
        build_program(open_checkpoint(str(tmp_path)))
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    with pytest.raises(ValueError, match=r"modules\.json: module 'Dense' is not supported"):
        build_program(open_checkpoint(str(tmp_path)))
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json: "):
        build_program(open_checkpoint(str(tmp_path)))
