"""Damaged checkpoints through everything that reads them: one that loads and packs also runs, any other is refused by its name."""

from pathlib import Path

import gguf
import pytest
from checkpoints import gguf_from_model
from folders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.gguf_file import GgufFile
from runner import Runner

Q = gguf.GGMLQuantizationType
K_QUANTS = {"attn_v": Q.Q6_K, "ffn_down": Q.Q5_K, "attn_output": Q.Q2_K, "ffn_up": Q.Q3_K, "ffn_gate": Q.Q3_K}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}

# Where a byte changes, as a share of the header (below 1) or of the tensors (from 1), and what it becomes.
CHANGES = st.lists(st.tuples(st.floats(0, 2, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole checkpoints; tests write `damaged` beside them."""
    folder = tmp_path_factory.mktemp("damaged")
    model = tiny_model("llama", folder / "safetensors", **SMALL)
    gguf_from_model(model, folder / "q4_1.gguf", lambda _: Q.Q4_1)
    gguf_from_model(model, folder / "q8_0.gguf", lambda _: Q.Q8_0)
    model = tiny_model("llama", folder / "wide", **WIDE)
    gguf_from_model(model, folder / "k_quants.gguf", lambda name: K_QUANTS.get(name.split(".")[-2], Q.Q4_K))
    (folder / "damaged").mkdir()
    return folder


def write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # no shorter file under a map of the last one
    path.write_bytes(data)


def changed(data: bytes, header: int, changes: list[tuple[float, int]]) -> bytes:
    out = bytearray(data)
    for place, byte in changes:
        out[int(place * header) if place < 1 else header + int((place - 1) * (len(out) - header))] = byte
    return bytes(out)


def runs(path: Path) -> bool:
    """Whether the checkpoint loads, on both backends alike; then a step has run on each. No error but a ValueError that names
    the file may come up."""
    ran = []
    for backend in (_core.reference_backend(), _core.cpu_backend(threads=1)):
        try:
            runner = Runner(backend, open_checkpoint(str(path)), length=20, tokens=20)
        except ValueError as error:
            assert "damaged" in str(error)
            ran.append(False)
        else:
            assert runner.logits([1, 2, 3, 4] * 5).shape == (20, runner.program.vocab)
            ran.append(True)
    assert ran[0] == ran[1]
    return ran[0]


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "k_quants"])
@settings(max_examples=60, deadline=None)
@given(changes=CHANGES)
def test_changed_gguf(name: str, changes: list[tuple[float, int]], folder: Path) -> None:
    whole = folder / f"{name}.gguf"
    header = min(tensor.begin for tensor in GgufFile(str(whole)).tensors.values())
    damaged = folder / "damaged.gguf"
    write(damaged, changed(whole.read_bytes(), header, changes))
    runs(damaged)


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES, which=st.sampled_from(["config.json", "model.safetensors"]))
def test_changed_folder(which: str, changes: list[tuple[float, int]], folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        data = (folder / "safetensors" / name).read_bytes()
        header = len(data) // 2 if name == "config.json" else 8 + int.from_bytes(data[:8], "little")
        write(folder / "damaged" / name, changed(data, header, changes) if name == which else data)
    runs(folder / "damaged")


def test_cuts_and_no_damage(folder: Path) -> None:
    """Every cut is refused; the whole files, under the same names, run."""
    damaged = folder / "damaged.gguf"
    for name in ("q4_1", "q8_0", "k_quants"):
        whole = (folder / f"{name}.gguf").read_bytes()
        write(damaged, whole)
        assert runs(damaged)
        for size in range(0, len(whole) - 32, len(whole) // 8):
            write(damaged, whole[:size])
            assert not runs(damaged)
    for name in ("config.json", "model.safetensors"):
        for other in ("config.json", "model.safetensors"):
            write(folder / "damaged" / other, (folder / "safetensors" / other).read_bytes())
        assert runs(folder / "damaged")
        whole = (folder / "damaged" / name).read_bytes()
        for size in range(0, len(whole) - 2, len(whole) // 8):
            write(folder / "damaged" / name, whole[:size])
            assert not runs(folder / "damaged")
