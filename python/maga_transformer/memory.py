"""Memory that this process may still take: the kernel's estimate, cut by every cgroup limit above it."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "none"


def available_bytes(root: Path = Path("/")) -> int:
    """`root` is the directory that holds proc and sys."""
    return min([_meminfo(root, "MemAvailable"), *_cgroup_room(root)])


def memory_bytes(root: Path = Path("/")) -> int:
    """Of the machine."""
    return _meminfo(root, "MemTotal")


def _meminfo(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name} line")


def _cgroup_room(root: Path) -> list[int]:
    """Limit minus use, for the process's cgroup and each of its parents. Reclaimable file cache does not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used, cache = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's; the mount's root is then the container's own group.
        for folder in [group, *group.parents]:
            room = _room(folder, limit, used, cache)
            if room is not None:
                rooms.append(room)
            if folder == base:
                break
    return rooms


def _room(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return None
        in_use = int((folder / used).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(text) - in_use + int(statistics.get(cache, 0)))
