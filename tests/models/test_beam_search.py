"""Beam search gives the ids of transformers' generate(num_beams=...), whatever runs beside it and however few pages there are."""

import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

STOPS = [5, 17]


class Engine:
    def __init__(self, folder: Path, *, pages: int, token_budget: int = 64) -> None:
        checkpoint = open_checkpoint(str(folder))
        backend = _core.cpu_backend(threads=1, quantize_activations=False)
        program, _ = build_program(checkpoint)
        weights = load_weights(backend, program, checkpoint)
        sizes = {"tokens": token_budget, "sequences": 16, "logit_rows": 16, "pages": pages, "page_tokens": 16}
        model = backend.load(program, weights, kv_dtype="fp32", **sizes)
        self.engine = _core.Engine(backend, model, max_sequences=16, token_budget=token_budget, max_queue=100)

    def submit(self, prompt: Sequence[int], sequences: int, **fields: Any) -> int:
        params = _core.SamplingParams(stop_token_ids=STOPS, **fields)
        return self.engine.submit(np.array(prompt, np.int32), params, sequences=sequences)

    def run(self, expected: dict[int, int]) -> dict[int, list[list[int]]]:
        """`expected`: outputs by request."""
        outputs: dict[tuple[int, int], list[int]] = {}
        running, deadline = sum(expected.values()), time.monotonic() + 60
        while running:
            assert time.monotonic() < deadline, "the engine is stuck"
            select.select([self.engine.event_fd()], [], [], 1.0)
            for event in self.engine.poll():
                outputs.setdefault((event.request, event.sequence), []).extend(event.tokens)
                assert not event.error
                running -= bool(event.finish)
        stats = self.engine.stats()
        assert stats["pages_live"] == 0
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        return {request: [outputs[request, i] for i in range(count)] for request, count in expected.items()}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(20, 96, length).tolist()


def expected(model: torch.nn.Module, prompt: Sequence[int], width: int, outputs: int, **settings: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        got = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            do_sample=False,
            num_return_sequences=outputs,
            eos_token_id=STOPS,
            pad_token_id=0,
            **settings,
        )
    answers = []
    for row in got[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in STOPS]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


STOPPING = {False: "heuristic", True: "first", "never": "never"}
CASES: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0},
    {"length_penalty": -1.0},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"early_stopping": "never", "length_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_model("llama", folder)
    with torch.no_grad():  # ends come often enough to matter
        model.lm_head.weight[STOPS] *= 1.5
    model.save_pretrained(folder)
    return model, folder


def fields_of(settings: dict[str, Any]) -> dict[str, Any]:
    fields = dict(settings)
    fields["beam_stop"] = STOPPING[fields.pop("early_stopping", False)]
    return fields


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_ids(model: tuple[torch.nn.Module, Path], settings: dict[str, Any], width: int) -> None:
    torch_model, folder = model
    engine = Engine(folder, pages=200)
    ended = set()
    for seed, length in enumerate([1, 3, 8, 15, 21]):
        prompt = prompt_of(length, seed)
        wanted = expected(torch_model, prompt, width, width, max_new_tokens=12, **settings)
        fields = fields_of(settings)
        request = engine.submit(prompt, width, max_new_tokens=12, beam_width=width, **fields)
        assert engine.run({request: width})[request] == wanted
        ended |= {answer[-1] in STOPS for answer in wanted}
    if settings.get("length_penalty", 0) <= 0 and "min_new_tokens" not in settings:
        assert True in ended, "ends are part of what is compared"


def test_fewer_outputs_than_beams(model: tuple[torch.nn.Module, Path]) -> None:
    torch_model, folder = model
    engine = Engine(folder, pages=200)
    request = engine.submit(prompt_of(9), 2, max_new_tokens=10, beam_width=6)
    assert engine.run({request: 2})[request] == expected(torch_model, prompt_of(9), 6, 2, max_new_tokens=10)


@pytest.mark.parametrize("pages", [9, 14, 300])
@pytest.mark.parametrize("token_budget", [16, 64])
def test_many_at_once(model: tuple[torch.nn.Module, Path], pages: int, token_budget: int) -> None:
    """Few pages: beams wait for others of theirs that have none."""
    torch_model, folder = model
    engine = Engine(folder, pages=pages, token_budget=token_budget)
    wanted, requests = {}, {}
    for i in range(6):
        prompt, width = prompt_of(5 + 6 * i, i), 2 + i % 4
        request = engine.submit(prompt, width, max_new_tokens=14, beam_width=width)
        requests[request] = width
        wanted[request] = expected(torch_model, prompt, width, width, max_new_tokens=14)
    plain = engine.submit(prompt_of(11), 1, max_new_tokens=20, temperature=0)
    outputs = engine.run({**requests, plain: 1})
    alone = Engine(folder, pages=300)
    request = alone.submit(prompt_of(11), 1, max_new_tokens=20, temperature=0)
    assert outputs.pop(plain) == alone.run({request: 1})[request]
    assert outputs == wanted
    assert engine.engine.stats()["finished"] == 7
    if pages == 9:
        assert engine.engine.stats()["preemptions"] > 0


def test_cancelling_ends_every_output_once(model: tuple[torch.nn.Module, Path]) -> None:
    _, folder = model
    engine = Engine(folder, pages=200).engine
    params = _core.SamplingParams(max_new_tokens=500, beam_width=4)
    request = engine.submit(np.array(prompt_of(9), np.int32), params, sequences=3)
    time.sleep(0.005)
    engine.cancel(request)
    assert engine.drain(30.0)
    ends = [(event.sequence, event.finish) for event in engine.poll()]
    assert sorted(ends) == [(0, "cancelled"), (1, "cancelled"), (2, "cancelled")]
    assert engine.stats()["pages_live"] == 0
    assert engine.stats()["cancelled"] == 1


@pytest.mark.parametrize(("sequences", "width"), [(3, 2), (1, 17)])
def test_the_width_is_bounded(model: tuple[torch.nn.Module, Path], sequences: int, width: int) -> None:
    engine = Engine(model[1], pages=20)
    with pytest.raises(ValueError, match=f"beam width is {width}"):
        engine.submit([1, 2], sequences, beam_width=width)
