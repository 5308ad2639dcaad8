"""Reading GGUF: what the gguf package writes is read back, and no damaged file gets further than an error that names it."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer.checkpoint import GgufCheckpoint, open_checkpoint
from maga_transformer.checkpoint.gguf_file import GgufFile

F32 = gguf.GGMLQuantizationType.F32
Q4_1 = gguf.GGMLQuantizationType.Q4_1
METADATA: dict[str, Any] = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "héllo",
    "a.words": ["x", "yy"],
    "a.numbers": [1, 2, 3],
}


def small(path: Path, **more: Any) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "w.weight": (rng.integers(0, 256, (3, 40), dtype=np.uint8), Q4_1),
        "n.weight": (rng.normal(size=5).astype(np.float32), F32),
    }
    return write_gguf(path, METADATA, tensors, architecture="other", **more)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def raw(entries: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def info(name: str, dimensions: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("other")


def test_metadata_and_tensors(tmp_path: Path) -> None:
    path = small(tmp_path / "small.gguf")
    file = GgufFile(str(path))
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    checkpoint = open_checkpoint(str(path))
    assert sorted(checkpoint.names()) == ["n.weight", "w.weight"]
    assert (checkpoint.dtype("w.weight"), checkpoint.shape("w.weight"), checkpoint.nbytes("w.weight")) == ("q4_1", (3, 64), 120)
    expected = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for name, data in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), data)
    with pytest.raises(ValueError, match=r"small\.gguf: no tensor nothing"):
        checkpoint.shape("nothing")


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    small(tmp_path / "small.gguf")
    assert open_checkpoint(str(tmp_path)).path.endswith("small.gguf")
    small(tmp_path / "second.gguf")
    with pytest.raises(ValueError, match=r"holds 2 GGUF models.*second\.gguf, small\.gguf"):
        open_checkpoint(str(tmp_path))


def test_alignment_64(tmp_path: Path) -> None:
    """ollama PR #10510."""
    wide, usual = GgufFile(str(small(tmp_path / "64.gguf", alignment=64))), GgufFile(str(small(tmp_path / "32.gguf")))
    assert all(tensor.begin % 64 == 0 for tensor in wide.tensors.values())
    for name in usual.tensors:
        np.testing.assert_array_equal(wide.tensor(name), usual.tensor(name))


def test_version_2(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(raw([ARCHITECTURE], [info("x", [2], 0, 0)], np.array([1, 2], np.float32).tobytes(), version=2))
    np.testing.assert_array_equal(GgufFile(str(path)).tensor("x"), [1, 2])


def test_splits_are_read_together(tmp_path: Path) -> None:
    for index, name in enumerate(("a", "b")):
        metadata = {"split.count": 2, "split.no": index}
        tensors = {f"{name}.weight": (np.full(4, index, np.float32), F32)}
        write_gguf(tmp_path / f"m-0000{index + 1}-of-00002.gguf", metadata, tensors, architecture="other")
    checkpoint = open_checkpoint(str(tmp_path))
    assert sorted(checkpoint.names()) == ["a.weight", "b.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("b.weight"), np.ones(4))
    with pytest.raises(ValueError, match="give the first"):
        open_checkpoint(str(tmp_path / "m-00002-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="m-00002-of-00002"):
        open_checkpoint(str(tmp_path))


def value(kind: int, data: bytes, key: str = "some.key") -> bytes:
    return text(key) + struct.pack("<I", kind) + data


HUGE = struct.pack("<Q", 2**64 - 1)
DAMAGED = {
    "nothing": (b"", "is empty"),
    "magic only": (b"GGUF", "header needs 4 bytes"),
    "a web page": (b"<!DOCTYPE html><html>", "this is an HTML page, not the weights"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0 is not supported"),
    "version 99": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^63 entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "claims 0 tensors and 9223372036854775808"),
    "2^62 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "claims"),
    "key beyond the file": (raw([HUGE + b"12345678"], []), "metadata entry 0 of 1 needs 18446744073709551615 bytes"),
    "text beyond the file": (raw([value(8, HUGE)], []), "metadata key some.key needs"),
    "unknown value type": (raw([value(77, b"")], []), "some.key has the unknown value type 77"),
    "array beyond the file": (raw([value(9, struct.pack("<IQ", 0, 2**60))], []), "some.key claims 1152921504606846976 array items"),
    "array of unknown": (raw([value(9, struct.pack("<IQ", 55, 1) + bytes(8))], []), "some.key has the unknown value type 55"),
    "array of arrays": (raw([value(9, struct.pack("<IQ", 9, 1) * 9)], []), "some.key nests arrays too deep"),
    "boolean 2": (raw([value(7, b"\x02")], []), "some.key holds 2"),
    "text that is not UTF-8": (raw([value(8, struct.pack("<Q", 1) + b"\xff")], []), "some.key holds a string"),
    "key twice": (raw([value(0, b"1"), value(0, b"1")], []), "some.key appears twice"),
    "alignment 0": (raw([value(4, struct.pack("<I", 0), "general.alignment")], []), "general.alignment 0"),
    "alignment 3": (raw([value(4, struct.pack("<I", 3), "general.alignment")], []), "general.alignment 3"),
    "alignment 2^31": (
        raw([value(4, struct.pack("<I", 2**31), "general.alignment")], [info("t", [4], 0, 0)], bytes(64)),
        "tensor t ends at byte 2147483664",
    ),
    "alignment of text": (raw([value(8, text("32"), "general.alignment")], []), "general.alignment '32'"),
    "no dimensions": (raw([], [info("t", [], 0, 0)]), "tensor t has 0 dimensions"),
    "2^32 - 1 dimensions": (raw([], [text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)]), "tensor t has 4294967295 dimensions"),
    "dimension 0": (raw([], [info("t", [1, 0], 0, 0)]), "tensor t has the impossible shape"),
    "size that wraps": (raw([], [info("t", [2**62, 4], 0, 0)]), "tensor t has the impossible shape"),
    "bytes that wrap": (raw([], [info("t", [2**62 - 1], 0, 0)], bytes(64)), "tensor t ends at byte 18446744073709551"),
    "blocks that wrap": (raw([], [info("t", [32, 2**60], 2, 0)]), "tensor t has the impossible shape"),
    "no whole blocks": (raw([], [info("t", [33, 2], 3, 0)]), "tensor t has rows of 33 elements, q4_1 needs"),
    "type of activations": (raw([], [info("t", [256, 2], 9, 0)]), "tensor t has the type q8_1, which is not supported .supp"),
    "unknown type": (raw([], [info("t", [256, 2], 999, 0)]), "tensor t has the type 999"),
    "odd offset": (raw([], [info("t", [4], 0, 4)], bytes(64)), "tensor t starts at offset 4"),
    "offset past the end": (raw([], [info("t", [4], 0, 2**40)], bytes(64)), "tensor t ends at byte"),
    "tensors overlap": (raw([], [info("t", [16], 0, 0), info("u", [4], 0, 32)], bytes(64)), "tensor u overlaps"),
    "tensor twice": (raw([], [info("t", [4], 0, 0), info("t", [4], 0, 32)], bytes(64)), "tensor t appears twice"),
    "no architecture": (raw([], []), "general.architecture is missing"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    """ollama #10930; merges and pre-tokenizers: tests/tokenizer/test_tokenizer.py."""
    data, message = DAMAGED[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(str(path))
    assert "damaged.gguf" in str(error.value)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = small(tmp_path / "whole.gguf").read_bytes()
    tensors = GgufFile(str(tmp_path / "whole.gguf")).tensors.values()
    needed = max(tensor.begin + tensor.nbytes for tensor in tensors)  # padding may follow
    cut = tmp_path / "cut.gguf"
    for size in range(needed):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_load_or_are_refused(changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "good.gguf"
    if not whole.exists():
        small(whole)
    data = bytearray(whole.read_bytes())
    for position, byte in changes:
        data[position % min(len(data), 420)] = byte  # the metadata and the tensor list
    damaged = folder / "changed.gguf"
    damaged.write_bytes(data)
    try:
        checkpoint = GgufCheckpoint(str(damaged))
        for name in checkpoint.names():
            assert checkpoint.tensor(name).nbytes == checkpoint.nbytes(name)
    except ValueError as error:
        assert "changed.gguf" in str(error)


def test_demo_model_header_cuts(demo_gguf: Path, tmp_path: Path) -> None:
    """A real header, with its 49,152 tokens: cut at many places, it never gets further than an error."""
    whole = demo_gguf.read_bytes()
    header = min(tensor.begin for tensor in GgufFile(str(demo_gguf)).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*np.linspace(0, header, 9, dtype=int), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))
