"""The choice of a device and of the type that it computes in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cards import CARDS, WHY_NONE
from maga_transformer import _core, device, startup
from maga_transformer.config import DEVICE_DEFAULTS, Config
from maga_transformer.device import Device, compute_dtype, find_device, library_folders


def cards(monkeypatch: pytest.MonkeyPatch, count: int) -> list[Any]:
    found = [SimpleNamespace(name=f"card {i}", capability=90) for i in range(count)]
    monkeypatch.setattr(_core, "cuda_devices", lambda: (found, "" if found else "no driver here"))
    return found


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 0)
    assert find_device("auto") == find_device("cpu") == Device("cpu")
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match="no driver here"):
            find_device(wanted)


def test_with_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cards(monkeypatch, 2)
    assert find_device("cpu") == Device("cpu")
    assert find_device("auto") == find_device("cuda") == Device("cuda", 0, found[0])
    assert find_device("cuda:1") == Device("cuda", 1, found[1])
    with pytest.raises(ValueError, match="valid: cuda:0 to cuda:1"):
        find_device("cuda:2")
    found[0].capability = 61
    assert find_device("auto") == Device("cuda", 1, found[1])
    found[1].capability = 70
    assert find_device("auto") == Device("cpu")


@pytest.mark.parametrize(
    "wanted, stored, capability, expected",
    [
        ("auto", "bf16", 90, "bf16"),
        ("auto", "fp16", 90, "fp16"),
        ("auto", "fp32", 80, "bf16"),
        ("auto", "q4_1", 90, "bf16"),
        ("auto", "bf16", 75, "fp16"),
        ("auto", "q8_0", 70, "fp16"),
        ("fp32", "bf16", 75, "fp32"),
        ("bf16", "fp16", 80, "bf16"),
        ("fp16", "bf16", 90, "fp16"),
    ],
)
def test_compute_dtype(wanted: str, stored: str, capability: int, expected: str) -> None:
    assert compute_dtype(wanted, stored, capability) == expected


@pytest.mark.parametrize(
    "stored, capability, wanted, said", [("bf16", 75, "auto", True), ("fp32", 90, "fp16", True), ("fp16", 90, "auto", False)]
)
def test_a_narrower_type_than_the_stored_one_is_said(
    stored: str, capability: int, wanted: str, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    monkeypatch.setattr(startup, "cuda_backend", lambda device, compute, share: made.append(compute))
    card = Device("cuda", 0, SimpleNamespace(name="card", capability=capability))
    startup.make_backend(Config(act_type=wanted), card, stored)
    assert made == ["fp16"] and (f"stored in {stored}" in caplog.text) == said


def test_bf16_on_a_card_without_it() -> None:
    with pytest.raises(ValueError, match=r"compute capability 7\.5"):
        compute_dtype("bf16", "bf16", 75)


def test_libraries_are_looked_for_in_every_folder_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/nvidia/cublas/lib", "a/nvidia/cu13/lib", "b/nvidia/nccl/lib", "b/nvidia/nccl/include"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(device.sys, "path", [str(tmp_path / "a"), str(tmp_path / "gone"), str(tmp_path / "b")])
    found = [str(Path(place).relative_to(tmp_path)) for place in library_folders()]
    assert found == ["a/nvidia/cu13/lib", "a/nvidia/cublas/lib", "b/nvidia/nccl/lib"]


def test_the_binding_says_why_there_is_no_card() -> None:
    assert bool(CARDS) != bool(WHY_NONE)
    if not CARDS:
        with pytest.raises((FileNotFoundError, _core.MagaError)) as error:
            _core.cuda_backend()
        assert str(error.value)


def test_a_large_card_runs_more_sequences_at_once():
    cards = [SimpleNamespace(total_bytes=size << 30) for size in (24, 80)]
    assert [Device("cuda", 0, card).defaults for card in cards] == ["cuda", "cuda from 64 GiB"]
    assert {"cuda", "cuda from 64 GiB", Device("cpu").defaults} == set(DEVICE_DEFAULTS)
