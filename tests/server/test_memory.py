"""Measured memory and the size of the K/V pool."""

from types import SimpleNamespace

import pytest
from maga_transformer import _core, startup
from maga_transformer.config import DEVICE_DEFAULTS, Config, ConfigError
from maga_transformer.device import Device
from maga_transformer.memory import available_bytes
from maga_transformer.server.serve import greeting
from maga_transformer.startup import Pool

from .conftest import demo_model

GIB = 1 << 30


def _machine(root, *, available_kib=8 << 20, cgroup="0::/a/b\n", files=None):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    if cgroup:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_bytes(root)


def test_without_cgroups_the_kernel_decides(tmp_path):
    assert _machine(tmp_path, cgroup=None) == 8 * GIB


def test_the_tightest_group_above_decides(tmp_path):
    group = "sys/fs/cgroup/a/"
    files = {
        group + "memory.max": f"{4 * GIB}\n",
        group + "memory.current": f"{3 * GIB}\n",
        group + "memory.stat": f"anon 5\ninactive_file {GIB}\n",
        group + "b/memory.max": "max\n",
        group + "b/memory.current": "1\n",
        group + "b/memory.stat": "anon 1\n",
    }
    assert _machine(tmp_path, files=files) == 2 * GIB  # the file cache can be given back


def test_a_full_group_leaves_nothing(tmp_path):
    group = "sys/fs/cgroup/a/b/"
    files = {group + "memory.max": "100\n", group + "memory.current": "150\n", group + "memory.stat": "inactive_file 0\n"}
    assert _machine(tmp_path, files=files) == 0


def test_version_one(tmp_path):
    group = "sys/fs/cgroup/memory/a/"
    files = {
        group + "memory.limit_in_bytes": f"{GIB}\n",
        group + "memory.usage_in_bytes": "0\n",
        group + "memory.stat": "total_inactive_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert _machine(tmp_path, cgroup="5:cpu:/a\n4:memory:/a\n", files=files) == GIB


def test_this_machine_has_memory():
    assert available_bytes() > 1 << 20


def pool(*, page_bytes=1 << 20, context=10000, **settings):
    return Pool(Config.without_environment(seq_size_per_block=16, **settings).for_device("cpu"), page_bytes, context)


def test_pages_for_all_sequences_but_at_most_half():
    assert pool(max_num_seqs=2, context=100).measured(1000 << 20)[0] == 14
    pages, why = pool(context=1600).measured(800 << 20)
    assert pages == 400 and "half of the 800 MiB" in why


def test_a_given_size_decides():
    assert pool(kv_cache_mem_mb=10).given(1000 << 20) == (10, "KV_CACHE_MEM_MB=10")
    assert pool().given(1000 << 20) is None
    with pytest.raises(ConfigError, match="KV_CACHE_MEM_MB=10: only 9 MiB"):
        pool(kv_cache_mem_mb=10).given(9 << 20)


def test_too_small_names_the_numbers():
    with pytest.raises(ConfigError, match=r"10 pages .*MAX_SEQ_LEN=320 needs 20\.0 MiB.*KV_CACHE_MEM_MB"):
        pool(kv_cache_mem_mb=10, max_seq_len=320, context=320).given(1000 << 20)
    with pytest.raises(ConfigError, match="0 pages"):
        pool(kv_cache_mem_mb=0, context=320).given(1000 << 20)
    with pytest.raises(ConfigError, match="0 pages"):
        pool().check(0, "GPU_MEMORY_UTILIZATION=0.1")


def test_a_lowered_context_is_said(caplog):
    pool(kv_cache_mem_mb=10).given(1000 << 20)
    assert "160 tokens" in caplog.text and "10000" in caplog.text


def test_a_runtime_on_a_card(monkeypatch):
    """The CPU stands in for the card's backend: what is chosen for it, and what the start message says."""
    card = SimpleNamespace(
        name="a card", capability=90, total_bytes=4 * GIB, free_bytes=3 * GIB, bytes_per_second=1e12, flops_per_second=1e14
    )
    asked = []

    def stand_in(device, compute, memory_utilization):
        asked.append((device.index, compute, memory_utilization))
        return _core.cpu_backend()

    monkeypatch.setattr(startup, "find_device", lambda wanted: Device("cuda", 1, card))
    monkeypatch.setattr(startup, "cuda_backend", stand_in)
    config = Config.without_environment(
        checkpoint_path=str(demo_model()), kv_cache_mem_mb=512, gpu_memory_utilization=0.5, max_num_batched_tokens=300
    )
    runtime = startup.load_runtime(config)
    assert asked == [(1, "bf16", 0.5)]
    assert runtime.config.max_num_seqs == DEVICE_DEFAULTS["cuda"]["max_num_seqs"]
    about = runtime.description
    assert (about.kv_dtype, about.card_bytes) == ("bf16", 4 * GIB)
    assert f"K/V {about.kv_bytes / 4 / GIB:.1%}, buffers " in greeting(runtime, "", 1) and "of 4096 MiB" in greeting(runtime, "", 1)
    with pytest.raises(ConfigError, match="KV_CACHE_MEM_MB=4000: only 3072 MiB"):
        startup.load_runtime(config.model_copy(update={"kv_cache_mem_mb": 4000}))
    with pytest.raises(ConfigError, match=r"ISA=avx2.*a card"):
        startup.load_runtime(config.model_copy(update={"isa": "avx2"}))
