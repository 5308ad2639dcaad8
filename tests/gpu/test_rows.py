"""What an engine on the card tells of its rows, beside the same engine on a CPU: log probabilities of a prompt, logits, hidden
states; tokens chosen through stages that only the host knows; and beams, whose pages are copied on the card."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import card, needs_card
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

pytestmark = needs_card

TOLERANCE = {"fp32": 1e-3, "bf16": 0.4}  # of logits up to 10


def answers(folder: Path, compute: str, backend: Any, params: Any, sequences: int = 1) -> dict[int, list[Any]]:
    """The events of each output."""
    checkpoint = open_checkpoint(str(folder))
    program, _ = build_program(checkpoint)
    weights = load_weights(backend, program, checkpoint)
    sizes = {"tokens": 64, "sequences": 8, "logit_rows": 8, "pages": 60, "page_tokens": 16}
    model = backend.load(program, weights, kv_dtype=compute, **sizes)
    engine = _core.Engine(backend, model, max_sequences=8, token_budget=64, max_queue=10)
    prompt = np.random.default_rng(1).integers(0, program.vocab, 40).astype(np.int32)
    engine.submit(prompt, params, sequences=sequences)
    told: dict[int, list[Any]] = {}
    deadline = time.monotonic() + 60
    while sum(events[-1].finish != "" for events in told.values()) < sequences:
        assert time.monotonic() < deadline, "the engine is stuck"
        select.select([engine.event_fd()], [], [], 1.0)
        for event in engine.poll():
            assert not event.error
            told.setdefault(event.sequence, []).append(event)
    return told


def both(folder: Path, compute: str, sequences: int = 1, **fields: Any) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    params = _core.SamplingParams(**fields)
    exact = _core.cpu_backend(quantize_activations=False)
    return answers(folder, compute, card(compute), params, sequences), answers(folder, "fp32", exact, params, sequences)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_rows(tiny_folder: Path, compute: str) -> None:
    fields = {"prompt_logprobs": 0, "return_logits": True, "return_hidden_states": True}
    ours, expected = both(tiny_folder, compute, max_new_tokens=1, temperature=0, **fields)
    found, wanted = ([score[0] for event in each[0] for score in event.prompt_logprobs] for each in (ours, expected))
    assert len(found) == len(wanted) == 39
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE[compute])
    last, right = ours[0][-1], expected[0][-1]
    np.testing.assert_allclose(last.logits, right.logits, atol=TOLERANCE[compute])
    assert last.hidden_states.shape == right.hidden_states.shape
    np.testing.assert_allclose(last.hidden_states, right.hidden_states, atol=TOLERANCE[compute])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "no_repeat_ngram_size": 3},
        {"seed": 3, "top_a": 0.05, "tfs": 0.99, "typical_p": 0.95, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"seed": 4, "mirostat_mode": 2, "mirostat_tau": 3.0},
        {"seed": 5, "top_p": 0.9, "top_p_decay": 0.9, "top_p_min": 0.2},
        {"seed": 6, "top_p": 0.9, "top_p_decay": 0.9, "top_p_reset_ids": [1, 2, 3]},
    ],
    ids=str,
)
def test_rare_samplers(tiny_folder: Path, fields: dict[str, Any]) -> None:
    ours, expected = both(tiny_folder, "fp32", max_new_tokens=12, **fields)
    tokens, right = ([token for event in each[0] for token in event.tokens] for each in (ours, expected))
    assert tokens == right


@pytest.mark.parametrize("width", [2, 5])
def test_beams(tiny_folder: Path, width: int) -> None:
    ours, expected = both(tiny_folder, "fp32", width, max_new_tokens=30, beam_width=width)
    for index in range(width):
        assert ours[index][-1].tokens == expected[index][-1].tokens
