"""Reading what torch.save writes: every tensor as torch has it, nothing run, and damage named."""

import argparse
import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from maga_transformer.checkpoint import TorchCheckpoint, open_checkpoint
from maga_transformer.checkpoint.torch_file import TorchFile, tensors_of
from maga_transformer.checkpoint.torch_pickle import Inert
from runner import Runner

STREAM = {"_use_new_zipfile_serialization": False}
IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "uint16",
)


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    file = TorchFile(str(path))
    return {name: file.tensor(tensor) for name, tensor in tensors_of(file.content, str(path)).items()}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Types that numpy lacks, as their bits."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(bits.get(tensor.dtype, tensor.dtype)).detach().numpy()


def odd_tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 10)
    return {
        **{f"dtype.{name}": (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in DTYPES},
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
        "whole": base,
        "view": base[2:5, 3:],
        "transposed": base.T,
        "column": base[:, 4],
        "parameter": torch.nn.Parameter(base[1]),
        "nested": {"deep": {"weight": base[3]}, "number": 3, "none": None},
    }


@pytest.mark.parametrize("options", [{}, STREAM], ids=["zip", "stream"])
def test_tensors_are_those_of_torch(options: dict[str, Any], tmp_path: Path) -> None:
    saved = odd_tensors()
    if options:
        del saved["dtype.uint16"]  # the older stream cannot hold it
    torch.save(saved, tmp_path / "x.pt", **options)
    found = tensors_in(tmp_path / "x.pt")
    expected = {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    expected["nested.deep.weight"] = saved["nested"]["deep"]["weight"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], as_numpy(tensor), err_msg=name)
        assert found[name].dtype == as_numpy(tensor).dtype
        assert name == "empty" or not found[name].flags.writeable


def test_state_dict_of_a_module_and_other_protocols(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    for protocol in (2, 3, 4, 5):
        torch.save(model.state_dict(), tmp_path / "x.pt", pickle_protocol=protocol)
        found = tensors_in(tmp_path / "x.pt")
        assert found.keys() == model.state_dict().keys()
        np.testing.assert_array_equal(found["0.weight"], model[0].weight.detach().numpy())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/should-not-exist-maga",)


class Loader:
    def __reduce__(self) -> tuple[Any, ...]:
        saved = io.BytesIO()
        torch.save(torch.ones(2), saved)
        return torch.storage._load_from_bytes, (saved.getvalue(),)


class Getter:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.nn.Linear, "__init__")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Evil(), r"this pickle wants (posix|nt)\.system, which is more than tensors"),
        (Getter(), r"wants builtins\.getattr"),
        (Loader(), r"wants torch\.storage\._load_from_bytes"),
        ({"args": argparse.Namespace(a=1)}, r"wants argparse\.Namespace"),
        ({"w": np.zeros(3)}, r"wants numpy\.\S+"),
        (torch.nn.Linear(2, 2), r"wants torch\.nn\.modules\.linear\.Linear"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, r"wants torch\.ComplexFloatStorage"),
        ({"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, "wants torch"),
        ({"w": torch.ones(3, 3).to_sparse()}, r"wants torch\._utils\._rebuild_sparse_tensor"),
    ],
)
@pytest.mark.parametrize("options", [{}, STREAM], ids=["zip", "stream"])
def test_more_than_tensors_is_refused_by_name(content: Any, message: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path, **options)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(str(tmp_path))
    assert str(path) in str(error.value)
    other_storage = "Storage" in message or message == "wants torch"
    if not (options and other_storage):  # in the older stream those have no known size
        TorchFile(str(path), inert=True)  # nothing that it names is run here either
    assert not os.path.exists("/tmp/should-not-exist-maga")


def test_inert_objects_keep_what_the_pickle_gives(tmp_path: Path) -> None:
    content = {"args": argparse.Namespace(layers=3), "other": Getter(), "w": torch.ones(2), "path": Path("x")}
    torch.save(content, tmp_path / "x.pt")
    found = TorchFile(str(tmp_path / "x.pt"), inert=True).content
    assert found["args"].state == {"layers": 3} and type(found["args"]).origin == "argparse.Namespace"
    assert isinstance(found["other"], Inert) and type(found["other"]).origin == "builtins.getattr"
    assert found["other"].arguments[1] == "__init__"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder with a model of safetensors, and its logits."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen2", folder, tie_word_embeddings=True)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    state = model.state_dict()
    torch.save(state, folder / "state.pt")
    return folder, logits


def logits_of(folder: Path) -> np.ndarray:
    return Runner(_core.reference_backend(), open_checkpoint(str(folder)), length=len(IDS), tokens=len(IDS)).logits(IDS)


def state_and_folder(saved: tuple[Path, np.ndarray], folder: Path) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text((saved[0] / "config.json").read_text())
    return torch.load(saved[0] / "state.pt")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
@pytest.mark.parametrize("wrap", ["", "state_dict", "model", "module"])
def test_single_files(name: str, wrap: str, saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    state = state_and_folder(saved, tmp_path)
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / name)
    torch.save({"lora": torch.ones(1)}, tmp_path / f"adapter_model{Path(name).suffix}")
    torch.save({"x": torch.ones(1)}, tmp_path / f"optimizer{Path(name).suffix}")
    checkpoint = open_checkpoint(str(tmp_path))
    assert isinstance(checkpoint, TorchCheckpoint) and checkpoint.file("model.norm.weight").endswith(name)
    np.testing.assert_allclose(logits_of(tmp_path), saved[1], rtol=0, atol=1e-4)


def shards(state: dict[str, torch.Tensor], folder: Path) -> Path:
    names = list(state)
    parts = {f"pytorch_model-0000{i + 1}-of-00003.bin": names[i::3] for i in range(3)}
    for file, own in parts.items():
        torch.save(OrderedDict((name, state[name]) for name in own), folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}))
    return index


def test_sharded_index(saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    index = shards(state_and_folder(saved, tmp_path), tmp_path)
    np.testing.assert_allclose(logits_of(tmp_path), saved[1], rtol=0, atol=1e-4)
    content = json.loads(index.read_text())
    moved = {**content["weight_map"], "model.norm.weight": "pytorch_model-00001-of-00003.bin"}
    last = content["weight_map"]["model.norm.weight"]
    if last == moved["model.norm.weight"]:
        moved["model.norm.weight"] = "pytorch_model-00002-of-00003.bin"
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is not in the shard that pytorch_model\.bin\.index\.json names"):
        open_checkpoint(str(tmp_path))
    index.write_text(json.dumps(content))
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model-00002-of-00003\.bin: this shard is named by .* but missing"):
        open_checkpoint(str(tmp_path))
    index.unlink()
    (tmp_path / "second.bin").write_bytes((tmp_path / "pytorch_model-00001-of-00003.bin").read_bytes())
    with pytest.raises(ValueError, match=r"second\.bin: tensor \S+ is also in \S+pytorch_model-00001"):
        open_checkpoint(str(tmp_path))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    def refused(data: bytes, message: str) -> None:
        path = tmp_path / "x.pt"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as error:
            TorchFile(str(path))
        assert str(path) in str(error.value)

    refused(b"", "the file is empty")
    refused(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer")
    refused(b"<html>", "this is an HTML page, not the weights")
    refused(b"weights", "not a file of torch.save")
    refused(b"\0" * 257 + b"ustar" + b"\0" * 50, "tar format of torch before")
    refused(pickle.dumps({"a": 1}, protocol=2) * 5, "a pickle that torch.save did not write")
    refused(b"\x80\x02r\xff\xff\xff\xffN.", "pickle at byte 0 is damaged or truncated")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("a.txt"), "x")  # of 1980, so that the bytes are the same each time
    refused((tmp_path / "other.zip").read_bytes(), "no data.pkl")
    with zipfile.ZipFile(tmp_path / "nested.zip", "w") as archive:
        archive.write(tmp_path / "other.zip", "archive/data.pkl")
    refused((tmp_path / "nested.zip").read_bytes(), "the pickle is damaged")
    torch.save({"w": torch.ones(100)}, tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as archive, zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    refused((tmp_path / "z.zip").read_bytes(), "is compressed, which torch.save does not do")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    refused((tmp_path / "script.pt").read_bytes(), "TorchScript program")


def test_tensors_beyond_their_storage(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(7, 3)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    shape = b"K\x07K\x03\x86"
    assert data.count(shape) == 1
    (tmp_path / "y.pt").write_bytes(data.replace(shape, b"K\x08K\x03\x86"))
    with pytest.raises(ValueError, match=r"a tensor of shape \(8, 3\) reaches beyond its storage of 84 bytes"):
        TorchFile(str(tmp_path / "y.pt"))
    strides = b"K\x03K\x01\x86"
    (tmp_path / "y.pt").write_bytes(data.replace(shape, b"K\xffK\x03\x86").replace(strides, b"K\x00K\x01\x86"))
    with pytest.raises(ValueError, match=r"repeats the elements of its storage"):
        TorchFile(str(tmp_path / "y.pt"))


CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.parametrize("options", [{}, STREAM], ids=["zip", "stream"])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, cut=st.floats(0, 1))
def test_damaged_files(options: dict[str, Any], changes: list[tuple[float, int]], cut: float, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    good, damaged = folder / f"good{len(options)}.pt", folder / "damaged.pt"
    if not good.exists():
        torch.save({"a.weight": torch.randn(4, 6), "b": {"c": torch.randn(5).half()}}, good, **options)
    data = bytearray(good.read_bytes())
    for place, byte in changes:
        data[int(place * len(data))] = byte
    for content in (bytes(data), bytes(data[: int(cut * len(data))])):
        damaged.unlink(missing_ok=True)
        damaged.write_bytes(content)
        try:
            for values in tensors_in(damaged).values():
                values.sum()
        except ValueError as error:
            assert "damaged.pt" in str(error)


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    """A file far larger than what a limited process may take opens, and gives any one tensor."""
    path = tmp_path / "x.pt"
    torch.save({f"{i}.weight": torch.full((256, 1024), float(i)) for i in range(64)}, path)  # 64 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = TorchFile(str(path))
    tensors = tensors_of(file.content, str(path))
    assert file.tensor(tensors["17.weight"])[255, 1023] == 17
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


def test_memo_slots_take_no_memory() -> None:
    """The index of a memo slot is up to the file: 2**32 - 1 would make the unpickler take 64 GiB."""
    from maga_transformer.checkpoint.torch_pickle import read_pickle

    data = b"\x80\x02N" + b"r" + struct.pack("<I", 2**32 - 1) + b"."
    with pytest.raises(ValueError, match=r"x\.pt: the pickle is damaged: .*memo slot 4294967295"):
        read_pickle(data, "x.pt", lambda *_: None)  # type: ignore[arg-type]
