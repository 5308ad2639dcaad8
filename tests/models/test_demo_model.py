"""The real model: greedy ids equal transformers' (demo_greedy.json) from the GGUF file and from the folder, in exact arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.tokenizer import load_tokenizer
from runner import Runner
from transformers import AutoModelForCausalLM

NEW_TOKENS = 64
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "demo_greedy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fixture", ["demo_gguf", "demo_folder"])
def test_greedy_ids_equal_transformers(fixture: str, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(str(request.getfixturevalue(fixture)))
    tokenizer = load_tokenizer(None, checkpoint)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": case["text"]}]) for case in CASES]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    assert prompts == [case["prompt"] for case in CASES]
    backend = _core.cpu_backend(quantize_activations=False)
    length = max(map(len, prompts)) + NEW_TOKENS
    runner = Runner(backend, checkpoint, length=length, tokens=max(map(len, prompts)), sequences=len(prompts))
    for case, answer in zip(CASES, runner.greedy(prompts, NEW_TOKENS, tokenizer.eos_ids), strict=True):
        assert answer == case["answer"], case["text"]


def test_the_ids_are_still_those_of_transformers(demo_folder: Path) -> None:
    """Each id is the most likely one after those before it; a few cases, since the file was written from all of them."""
    assert len(CASES) == 30 and sum(len(case["answer"]) for case in CASES) > 1000
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    for case in CASES[:3]:
        answer = case["answer"]
        with torch.no_grad():
            logits = model(torch.tensor([[*case["prompt"], *answer[:-1]]]), logits_to_keep=len(answer)).logits[0]
        assert answer == logits.argmax(dim=1).tolist()
        assert len(answer) == NEW_TOKENS or answer[-1] == model.generation_config.eos_token_id
