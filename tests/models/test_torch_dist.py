"""Distributed checkpoints (torch_dist), as torch itself writes them and in chunks of many ranks."""

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.checkpoint.torch_dist import read_distributed
from megatron import CORE, Tensors, llama_layers, rank_layer
from test_megatron import args_of, check, expected, outside
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo

FUSED = {**CORE, "norm_1": "self_attention.linear_qkv.layer_norm_", "norm_2": "mlp.linear_fc1.layer_norm_"}


def whole_tensors(model: torch.nn.Module, names: dict[str, str], *, stacked: bool, gate_apart: bool = False) -> Tensors:
    """Of Megatron-Core: no ranks; equal layers as one tensor."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    by_layer = []
    for layer in llama_layers(model):
        own = {}
        for role, tensor in rank_layer(layer, 0, 1, head_dim, 3.0, config.num_key_value_heads).items():
            base, _, kind = role.rpartition(".")
            name = f"{names[base]}.{kind}".replace("_.weight", "_weight")
            if base == "up" and gate_apart:
                own[f"{name}_w"], own[f"{name}_v"] = tensor.chunk(2)
            else:
                own[name] = tensor
        by_layer.append(own)
    tables = outside(model)
    found = {
        "embedding.word_embeddings.weight": torch.cat([tables["embedding"], torch.full((32, config.hidden_size), 9.0)]),
        "decoder.final_layernorm.weight": tables["final_norm.weight"],
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
    }
    if "head" in tables:
        found["output_layer.weight"] = torch.cat([tables["head"], torch.full((32, config.hidden_size), 9.0)])
    for name in by_layer[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([own[name] for own in by_layer])
        else:
            found |= {f"decoder.layers.{i}.{name}": own[name] for i, own in enumerate(by_layer)}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_chunks(folder: Path, tensors: Tensors, cut: Callable[[str, torch.Tensor], int]) -> None:
    """As many ranks do: each tensor in `cut` pieces along its longest side, over two files."""
    folder.mkdir(parents=True)
    files = [(folder / f"__{i}_0.distcp").open("wb") for i in range(2)]
    tensors_index: dict[str, Any] = {"rng_state": index.BytesStorageMetadata()}
    places = {}
    for name, tensor in tensors.items():
        axis = int(np.argmax(tensor.shape))
        chunks, start = [], 0
        for number, piece in enumerate(tensor.chunk(cut(name, tensor), axis)):
            offsets = torch.Size([start if i == axis else 0 for i in range(tensor.ndim)])
            file = files[number % 2]
            begin = file.tell()
            torch.save(piece.clone(), file)
            chunks.append(index.ChunkStorageMetadata(offsets=offsets, sizes=piece.shape))
            places[index.MetadataIndex(name, offsets)] = _StorageInfo(f"__{number % 2}_0.distcp", begin, file.tell() - begin)
            start += piece.shape[axis]
        properties = index.TensorProperties(dtype=tensor.dtype)
        tensors_index[name] = index.TensorStorageMetadata(properties=properties, size=tensor.shape, chunks=chunks)
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(index.Metadata(tensors_index, storage_data=places)))


def write_common(folder: Path, args: dict[str, Any]) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": argparse.Namespace(**args), "iteration": 7}, folder / "common.pt")


@pytest.mark.parametrize("stacked", [True, False])
def test_as_torch_writes_it(stacked: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    folder = tmp_path / "m" / "iter_0000007"
    tensors = whole_tensors(model, FUSED, stacked=stacked)
    dcp.save({**tensors, "rng_state": "x"}, checkpoint_id=folder, no_dist=True)
    write_common(folder, args_of(model))
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("7")
    assert check(tmp_path / "m", expected(model)).shape("model.embed_tokens.weight") == (96, 48)
    found = read_distributed(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].shard().read(), tensor)


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("gate_apart", [False, True])
def test_chunks_of_many_ranks(pieces: int, gate_apart: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "hf", head_dim=16, tie_word_embeddings=True, num_hidden_layers=4)
    folder = tmp_path / "m"
    write_chunks(folder, whole_tensors(model, CORE, stacked=True, gate_apart=gate_apart), lambda *_: pieces)
    write_common(folder, args_of(model))
    checkpoint = check(folder, expected(model))
    for name in checkpoint.names():
        before = checkpoint.tensor(name).copy()
        checkpoint.release(name)
        np.testing.assert_array_equal(checkpoint.tensor(name), before)


def test_a_stack_is_read_by_layer(tmp_path: Path) -> None:
    """Cut along the layers: a layer's own chunk is all that is looked at."""
    stack = torch.randn(16, 3, 5)
    write_chunks(tmp_path / "m", {"decoder.layers.x.weight": stack}, lambda *_: 4)
    tensor = read_distributed(tmp_path / "m")["decoder.layers.x.weight"]
    for i in range(16):
        np.testing.assert_array_equal(tensor.layer(i).read(), stack[i])
        assert len(tensor.layer(i).mapped()) == 1


def damaged(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    tensors = {"decoder.final_layernorm.weight": torch.ones(8), "embedding.word_embeddings.weight": torch.ones(8, 4)}
    folder = tmp_path / "m"
    write_chunks(folder, tensors, lambda *_: 2)
    original = (folder / ".metadata").read_bytes()

    def refused(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message) as error:
            open_checkpoint(str(folder))
        assert str(folder) in str(error.value)
        (folder / ".metadata").write_bytes(original)

    refused(FileNotFoundError, r"no config\.json, and .* does not hold the args")
    damaged(folder, lambda m: m.storage_data.clear())
    refused(ValueError, r"has no place in \(8,\) or in a file")
    damaged(folder, lambda m: m.state_dict_metadata["decoder.final_layernorm.weight"].chunks.pop())
    refused(ValueError, r"the chunks of tensor decoder\.final_layernorm\.weight do not make its shape \(8,\)")
    damaged(folder, lambda m: [setattr(info, "offset", 1 << 40) for info in m.storage_data.values()])
    refused(ValueError, r"ends at byte \d+, the file has \d+ bytes; truncated")
    damaged(folder, lambda m: [setattr(info, "relative_path", "../x") for info in m.storage_data.values()])
    refused(ValueError, r"the place of \S+ is '\.\./x'")
    damaged(folder, lambda m: [setattr(info, "relative_path", "gone.distcp") for info in m.storage_data.values()])
    refused(FileNotFoundError, r"gone\.distcp: \.metadata names this file, but it is missing")
    (folder / ".metadata").write_bytes(original[: len(original) // 2])
    refused(ValueError, r"\.metadata: the pickle is damaged")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused(ValueError, r"\.metadata: not the index of a distributed checkpoint")


@settings(max_examples=100, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_index(changes: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed-index"
    if not folder.exists():
        write_chunks(folder, {"a.weight": torch.ones(8, 4), "decoder.layers.b.weight": torch.ones(3, 8)}, lambda *_: 2)
        (folder / "good").write_bytes((folder / ".metadata").read_bytes())
    data = bytearray((folder / "good").read_bytes())
    for place, byte in changes:
        data[int(place * len(data))] = byte
    (folder / ".metadata").write_bytes(data)
    try:
        for tensor in read_distributed(folder).values():
            tensor.shard().read()
            if tensor.shape:
                tensor.layer(tensor.shape[0] - 1).read()
    except (ValueError, FileNotFoundError) as error:
        assert str(folder) in str(error)
