"""The real model on the card: in fp32 the texts of the CPU's exact mode, in bf16 those of transformers there, ties left aside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import card, needs_card
from jobs import Harness, Job
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

pytestmark = needs_card

NEW_TOKENS = 48
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "models/demo_greedy.json").read_text(encoding="utf-8"))[:10]
# Logits of about 20 have steps of 1/8 in bf16; two programs that round at different places may be some of them apart.
TIE = 0.5


def greedy(backend: _core.Backend, path: Path, kv_dtype: str) -> list[list[int]]:
    """All cases as one batch, past the end of the text."""
    checkpoint = open_checkpoint(str(path))
    program, _ = build_program(checkpoint)
    weights = load_weights(backend, program, checkpoint)
    model = backend.load(
        program, weights, tokens=256, sequences=16, logit_rows=16, pages=200, page_tokens=16, kv_dtype=kv_dtype
    )  # fmt: skip
    engine = Harness(_core.Engine(backend, model, max_sequences=16, token_budget=256, max_queue=100))
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "logprobs": -1}
    return [outputs[0].tokens for outputs in engine.run([Job(case["prompt"], params=params) for case in CASES])]


def test_fp32_equals_the_exact_mode_of_the_cpu(demo_model_file: Path) -> None:
    found = greedy(card("fp32"), demo_model_file, "fp32")
    assert found == greedy(_core.cpu_backend(quantize_activations=False), demo_model_file, "fp32")
    for case, tokens in zip(CASES, found, strict=True):  # and transformers', which end with the text
        answer = case["answer"][:NEW_TOKENS]
        assert tokens[: len(answer)] == answer


def test_bf16_agrees_with_transformers(demo_model_file: Path, tmp_path: Path) -> None:
    """Each of our tokens is transformers' choice after the ones before it, or as good as that within rounding."""
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    from folders import demo_folder

    folder = demo_folder(demo_model_file, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    same = 0
    found = greedy(card("bf16"), demo_model_file, "bf16")
    for case, tokens in zip(CASES, found, strict=True):
        ids = torch.tensor([[*case["prompt"], *tokens[:-1]]], device="cuda")
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=NEW_TOKENS).logits[0].float().cpu().numpy()
        gaps = logits.max(axis=1) - logits[np.arange(NEW_TOKENS), tokens]
        assert (gaps <= TIE).all(), case["text"]
        same += int((gaps == 0).sum())
    assert same > 0.95 * len(CASES) * NEW_TOKENS
