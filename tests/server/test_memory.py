"""Measured memory and the size of the K/V pool."""

import pytest
from maga_transformer.config import Config, ConfigError
from maga_transformer.memory import available_bytes
from maga_transformer.startup import Pool

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
