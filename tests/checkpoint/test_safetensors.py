"""Reading Hugging Face folders: what is right loads as the safetensors package loads it, what is damaged is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.safetensors import SafetensorsFile
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.randn(7, generator=torch.Generator().manual_seed(1)).half(),
    "d": torch.tensor([[1, -2], [3, 4]], dtype=torch.int8),
    "empty": torch.zeros(0),
}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return str(path)


def entry(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_values_and_types(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config == {"hidden_size": 3}
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    assert {name: checkpoint.dtype(name) for name in TENSORS} == {
        "a": "fp32",
        "b": "bf16",
        "c": "fp16",
        "d": "int8",
        "empty": "fp32",
    }
    for name, tensor in TENSORS.items():
        found = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(tensor.shape) == found.shape
        assert checkpoint.nbytes(name) == tensor.nbytes
        expected = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(found, expected.numpy())
    kept = checkpoint.tensor("a")
    checkpoint.close()
    assert kept.sum() == 66  # arrays outlive the checkpoint
    with pytest.raises(ValueError, match="no tensor a"):
        checkpoint.tensor("a")


def test_tensors_at_odd_bytes(tmp_path: Path) -> None:
    data = b"\x01" + np.array([1.5, 2.5], np.float32).tobytes()
    path = write(tmp_path / "odd.safetensors", {"x": entry(0, 1, [1], "U8"), "y": entry(1, 9, [2])}, data)
    np.testing.assert_array_equal(SafetensorsFile(path).tensor("y"), [1.5, 2.5])


BAD_HEADERS = {
    "unknown dtype": ({"x": entry(0, 4, [1], "F33")}, "tensor x: unknown dtype 'F33'"),
    "dtype is no string": ({"x": entry(0, 4, [1], ["F32"])}, "tensor x: unknown dtype"),
    "shape and extent differ": ({"x": entry(0, 4, [2])}, "tensor x: F32 of shape .2. needs 8 bytes"),
    "negative size": ({"x": entry(0, 4, [-1])}, "tensor x: shape"),
    "boolean size": ({"x": entry(0, 4, [True])}, "tensor x: shape"),
    "fractional size": ({"x": entry(0, 4, [1.0])}, "tensor x: shape"),
    "sizes beyond any tensor": ({"x": entry(0, 0, [2**62, 2**62, 0])}, "tensor x: shape"),
    "too many dimensions": ({"x": entry(0, 4, [1] * 99)}, "tensor x: shape"),
    "offsets reversed": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "tensor x: F32"),
    "three offsets": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, "tensor x: data_offsets"),
    "no offsets": ({"x": {"dtype": "F32", "shape": [1]}}, "tensor x: header entry"),
    "entry is a number": ({"x": 4}, "tensor x: header entry"),
    "gap": ({"x": entry(0, 4, [1]), "y": entry(8, 12, [1])}, "tensor y leaves a gap"),
    "overlap": ({"x": entry(0, 8, [2]), "y": entry(4, 12, [2])}, "tensor y overlaps"),
    "beyond the file": ({"x": entry(0, 400, [100])}, "truncated"),
    "file too long": ({"x": entry(0, 4, [1])}, "truncated or padded"),
    "a list": ([1], "expected a JSON object"),
    "not JSON": (b"{nonsense", "header: not valid JSON"),
    "not UTF-8": (b"\xff\xfe{}", "header: not valid JSON"),
    "nested without end": (b"[" * 100_000, "header: not valid JSON"),
    "duplicate name": (b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{}}', "duplicate key 'x'"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_name_file_and_tensor(case: str, tmp_path: Path) -> None:
    header, message = BAD_HEADERS[case]
    path = write(tmp_path / "bad.safetensors", header, bytes(12))
    with pytest.raises(ValueError, match=message) as error:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(error.value)


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 1000])
def test_bad_header_lengths(length: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        SafetensorsFile(write(tmp_path / "bad.safetensors", {"x": entry(0, 4, [1])}, bytes(4), length))


def test_short_files_and_lfs_pointers(tmp_path: Path) -> None:
    for content, message in (
        (b"", "is empty"),
        (b"1234567", "too short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            SafetensorsFile(str(tmp_path / "x.safetensors"))


def test_every_cut_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.safetensors"):
            SafetensorsFile(str(cut))


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_load_or_are_refused(changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "good.safetensors"
    if not whole.exists():
        save_file(TENSORS, whole)
    data = bytearray(whole.read_bytes())
    for position, value in changes:
        data[position % min(len(data), 500)] = value  # mostly the header
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(data)
    try:
        file = SafetensorsFile(str(damaged))
    except ValueError as error:
        assert "damaged.safetensors" in str(error)
        return
    for name in file.entries:
        assert file.tensor(name).nbytes == file.entries[name].end - file.entries[name].begin


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": TENSORS["c"]}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def edit_map(folder: Path, **changes: str | None) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard}
    file.write_text(json.dumps(index))


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert checkpoint.file("c").endswith("model-00002-of-00002.safetensors")
    expected = load_file(sharded / "model-00002-of-00002.safetensors")["c"]
    np.testing.assert_array_equal(checkpoint.tensor("c"), expected.numpy())


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"adapter": TENSORS["c"]}, sharded / "adapter_model.safetensors")
    assert sorted(open_checkpoint(str(sharded)).names()) == ["a", "b", "c"]
    save_file({"a": TENSORS["c"]}, sharded / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: tensor a is also in .*model-00001"):
        open_checkpoint(str(sharded))


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": "model-00001-of-00002.safetensors"}, "model-00001.*tensor d is not in the shard"),
        ({"c": "model-00001-of-00002.safetensors"}, "tensor c is not in the shard|tensor c is not listed"),
        ({"b": None}, "model-00001.*tensor b is not listed"),
        ({"a": "../model.safetensors"}, "not a file name of this folder"),
    ],
)
def test_index_and_shards_disagree(changes: dict, message: str, sharded: Path) -> None:
    edit_map(sharded, **changes)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(str(sharded))


def test_index_that_is_none(sharded: Path) -> None:
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "["):
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json"):
            open_checkpoint(str(sharded))


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no weights here"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: give the folder that holds this file"):
        open_checkpoint(str(tmp_path / "pytorch_model.bin"))
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))
    for text in ("", "[]", '{"a": 1, "a": 2}', "\ud800".encode("utf-16", "surrogatepass").decode("latin-1")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            open_checkpoint(str(tmp_path))
