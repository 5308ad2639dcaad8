"""The GPU that tests use, and the mark of those that need one."""

import functools

import pytest
from maga_transformer import _core
from maga_transformer.device import Device, cuda_backend

CARDS, WHY_NONE = _core.cuda_devices()
COMPUTE = ("fp32", "bf16", "fp16")  # what it computes in
needs_card = [pytest.mark.gpu, pytest.mark.skipif(not CARDS, reason=f"no GPU: {WHY_NONE}")]


@functools.cache
def card(compute: str) -> _core.Backend:
    """The first one, with a tenth of its memory: pools of several engines must fit side by side."""
    return cuda_backend(Device("cuda", 0, CARDS[0]), compute, 0.1)
