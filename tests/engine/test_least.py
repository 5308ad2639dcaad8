"""The least times that an engine counts are those of its steps by the costs of the program."""

from pathlib import Path

import pytest
from folders import tiny_model
from jobs import Harness, Job
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program


def test_least_seconds_of_steps(tmp_path: Path) -> None:
    tiny_model("mistral", tmp_path, sliding_window=6)
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    backend = _core.cpu_backend(threads=1)
    weights = load_weights(backend, program, checkpoint)
    model = backend.load(program, weights, tokens=32, sequences=2, logit_rows=2, pages=4, page_tokens=16, kv_dtype="fp16")
    fused, sizes = model.program, [float(weight.bytes) for weight in weights]
    bandwidth, flops = 1e7, 5e6  # so that some ops are bound by bytes and some by arithmetic
    engine = _core.Engine(
        backend,
        model,
        max_sequences=2,
        token_budget=32,
        max_queue=2,
        bytes_per_second=bandwidth,
        flops_per_second=flops,
        weight_bytes=sizes,
    )
    Harness(engine).run([Job(list(range(5)), params={"max_new_tokens": 4, "temperature": 0})])
    expected = dict.fromkeys(("", "weights_", "kv_", "arithmetic_"), 0.0)
    bound_by = set()
    for tokens, context in ((5, 0), (1, 5), (1, 6), (1, 7)):
        work = {"sequences": 1, "tokens_per_sequence": tokens, "context": context, "logit_rows": 1, "kv_dtype": "fp16"}
        for ops, weight, kv in _core.cost(fused, **work, weight_bytes=sizes):
            expected[""] += max(ops / flops, (weight + kv) / bandwidth)
            bound_by.add(ops / flops > (weight + kv) / bandwidth)
            expected["weights_"] += weight / bandwidth
            expected["kv_"] += kv / bandwidth
            expected["arithmetic_"] += ops / flops
    assert bound_by == {True, False}
    stats = engine.stats()
    for part, seconds in expected.items():
        assert stats[f"least_{part}seconds"] == pytest.approx(seconds)
