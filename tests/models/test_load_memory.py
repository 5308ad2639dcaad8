"""Loading takes the packed model and less than one layer more, whatever the layout: files are mapped, joined tensors live one at a
time, and what has been packed is given back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import edit_config, tiny_model
from megatron import CORE, llama_layers, write_megatron

SIZES: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PROCESS = 8 << 20  # code, threads, and what the allocator keeps of joined tensors
LAYER = (4 * 512 * 512 + 3 * 512 * 2048) * 4  # bytes
# In a process of its own, which has loaded nothing before: its resident memory, pages of mapped files and all.
LOAD = """
import json, sys
from pathlib import Path
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))

heard = []
backend = _core.cpu_backend(threads=1, quantize_activations=False)
before = memory("VmRSS")
checkpoint = open_checkpoint(sys.argv[1], sys.argv[2])
program, _ = build_program(checkpoint)
opened = memory("VmRSS")
weights = load_weights(backend, program, checkpoint, progress=lambda *done: heard.append(done), workers=2)
packed = sum(weight.bytes for weight in weights)
print(json.dumps({"opened": opened - before, "peak": memory("VmHWM") - before, "packed": packed, "heard": heard}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    model = tiny_model("llama", root / "safetensors", **SIZES)
    for name in ("torch", "stream", "megatron", "dummy"):
        (root / name).mkdir()
        (root / name / "config.json").write_text((root / "safetensors" / "config.json").read_text())
    edit_config(root / "dummy", dtype="float32")
    torch.save(model.state_dict(), root / "torch" / "pytorch_model.bin")
    torch.save(model.state_dict(), root / "stream" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    outside = {"embedding": model.model.embed_tokens.weight, "final_norm.weight": model.model.norm.weight}
    outside = {name: tensor.detach() for name, tensor in {**outside, "head": model.lm_head.weight}.items()}
    write_megatron(root / "megatron", llama_layers(model), outside, CORE, head_dim=64, kv_heads=8, ranks=2)
    return root


@pytest.mark.parametrize("layout", ["safetensors", "torch", "stream", "megatron", "dummy"])
def test_peak(layout: str, folders: Path) -> None:
    arguments = [str(folders / layout), "dummy" if layout == "dummy" else "auto"]
    run = subprocess.run([sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    block = 4 * (4000 * 512 + (1 << 20)) if layout == "dummy" else 0  # random values, of which every tensor is a part
    assert told["packed"] > 12 * LAYER * 0.9
    assert told["opened"] < 8 << 20
    assert told["packed"] * 0.9 < told["peak"] < told["packed"] + LAYER + PROCESS + block
    done = [count for count, _ in told["heard"]]
    assert told["heard"][-1][0] == told["heard"][-1][1] > 12 * LAYER and done == sorted(set(done))
