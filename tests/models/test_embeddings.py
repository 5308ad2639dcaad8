"""Encoders and decoders that embed or score give the vectors and logits of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from folders import edit_config
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program
from models_table import check_features
from runner import embedded
from tiny_embedders import KINDS, SCORERS, TEXTS, pooled, scored, sentence_transformer, tiny

BACKENDS = {
    "reference": lambda: _core.reference_backend(),
    "cpu": lambda: _core.cpu_backend(threads=2, quantize_activations=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", ["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, pooling: str, backend: str, tmp_path: Path) -> None:
    model = tiny(kind, "Model", tmp_path)
    sentence_transformer(tmp_path, pooling)
    expected = pooled(model, pooling)
    assert np.abs(expected).max() > 0.5
    program, family = build_program(open_checkpoint(str(tmp_path)))
    if family.encoder:
        check_features(program, family)
    np.testing.assert_allclose(embedded(BACKENDS[backend](), open_checkpoint(str(tmp_path)), TEXTS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", SCORERS)
def test_scores(kind: str, labels: int, backend: str, tmp_path: Path) -> None:
    model = tiny(kind, "ForSequenceClassification", tmp_path, num_labels=labels)
    expected = scored(model)
    found = embedded(BACKENDS[backend](), open_checkpoint(str(tmp_path)), TEXTS)
    assert found.shape == (len(TEXTS), labels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_nomic_bert_by_its_published_keys(tmp_path: Path) -> None:
    """Which are GPT-2's; a scaling factor makes its rotary base dynamic beyond the positions that it was trained on."""
    for kind, positions in (
        ("nomic-bert", {"n_positions": 64, "max_trained_positions": 32, "rotary_scaling_factor": None}),
        ("nomic-bert-dynamic", {"n_positions": 64, "max_trained_positions": 32, "rotary_scaling_factor": 2}),
    ):
        expected = pooled(tiny(kind, "Model", tmp_path / kind), "mean")
        published = {
            "architectures": ["NomicBertModel"],
            "model_type": "nomic_bert",
            "vocab_size": 96,
            "n_embd": 48,
            "n_inner": 80,
            "n_layer": 3,
            "n_head": 4,
            "layer_norm_epsilon": 1e-5 if kind == "nomic-bert" else 1e-12,
            "activation_function": "swiglu",
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "type_vocab_size": 2,
            "prenorm": False,
            "causal": False,
            "use_rms_norm": False,
            **positions,
        }
        (tmp_path / kind / "config.json").write_text(json.dumps(published))
        checkpoint = open_checkpoint(str(tmp_path / kind))
        program, family = build_program(checkpoint)
        assert program.max_positions == 64 and family.task.pooling == "mean"
        found = embedded(BACKENDS["reference"](), checkpoint, TEXTS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for key, value in (("moe_every_n_layers", 2), ("prenorm", True), ("rotary_emb_fraction", 0.0), ("activation_function", "glu")):
        edit_config(tmp_path / kind, **{**published, "moe_every_n_layers": None, key: value})
        with pytest.raises(ValueError, match=f"{key}|'glu'"):
            build_program(open_checkpoint(str(tmp_path / kind)))


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
