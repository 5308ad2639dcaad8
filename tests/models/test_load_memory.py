"""Loading takes the packed model and little more, whatever the layout: files are mapped, and joined tensors live one at a time."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from megatron import CORE, llama_layers, write_megatron

SIZES: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LAYER = (4 * 512 * 512 + 3 * 512 * 2048) * 4  # bytes


def anonymous_bytes() -> int:
    """What the process holds beside mapped files, whose pages the system takes back as it likes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    pytest.skip("this system does not tell anonymous memory")


class Peak:
    """The most that anonymous_bytes was while the block ran, above what it was before."""

    def __enter__(self) -> "Peak":
        self.most, self._before, self._done = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, anonymous_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    model = tiny_model("llama", root / "safetensors", **SIZES)
    for name in ("torch", "stream"):
        (root / name).mkdir()
        (root / name / "config.json").write_text((root / "safetensors" / "config.json").read_text())
    torch.save(model.state_dict(), root / "torch" / "pytorch_model.bin")
    torch.save(model.state_dict(), root / "stream" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    outside = {"embedding": model.model.embed_tokens.weight, "final_norm.weight": model.model.norm.weight}
    outside = {name: tensor.detach() for name, tensor in {**outside, "head": model.lm_head.weight}.items()}
    write_megatron(root / "megatron", llama_layers(model), outside, CORE, head_dim=64, kv_heads=8, ranks=2)
    (root / "megatron" / "config.json").write_text((root / "safetensors" / "config.json").read_text())
    (root / "dummy").mkdir()
    (root / "dummy" / "config.json").write_text((root / "safetensors" / "config.json").read_text())
    edit_config(root / "dummy", dtype="float32")
    return root


@pytest.mark.parametrize("layout", ["safetensors", "torch", "stream", "megatron", "dummy"])
def test_peak(layout: str, folders: Path) -> None:
    heard: list[tuple[int, int]] = []
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    block = 4 * (4000 * 512 + (1 << 20)) if layout == "dummy" else 0  # random values, of which every tensor is a part
    with Peak() as opening:
        checkpoint = open_checkpoint(str(folders / layout), "dummy" if layout == "dummy" else "auto")
        program, _ = build_program(checkpoint)
    assert opening.most < 8 << 20
    with Peak() as loading:
        weights = load_weights(backend, program, checkpoint, progress=lambda *done: heard.append(done), workers=2)
    packed = sum(weight.bytes for weight in weights)
    assert packed > 12 * LAYER * 0.4
    assert loading.most > packed * 0.5  # the sampling works
    assert loading.most < packed + LAYER + block
    assert heard[-1][0] == heard[-1][1] > 12 * LAYER
    assert np.all(np.diff([done for done, _ in heard]) > 0)
