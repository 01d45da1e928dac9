"""What the place itself can do: fio on a file there, and memcpy."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

MIB = 1 << 20


def is_tmpfs(folder: Path) -> bool:
    """Whether `folder` is in memory: there is nothing to wait for, so two threads copy instead of a deep queue."""
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, check=True
    )
    return kind.stdout.strip() == "tmpfs"


def fio(folder: Path, operation: str, total: int, block: int, depth: int) -> float | None:
    """GB per second of fio's `operation` (`read` or `write`) on a file of `total` bytes that has its blocks; direct
    I/O, the flush at the end of writes included. None without fio."""
    if shutil.which("fio") is None:
        return None
    path = folder / "fio"
    if not path.exists():
        _fio(path, "write", total, MIB, 8, memory=is_tmpfs(folder))
    return _fio(path, operation, total, block, depth, memory=is_tmpfs(folder))


def _fio(path: Path, operation: str, total: int, block: int, depth: int, *, memory: bool) -> float:
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={operation}", f"--bs={block}"]
    command += ["--output-format=json", "--group_reporting", "--randrepeat=0", "--overwrite=1"]
    if memory:
        half = total // 2 // block * block
        command += ["--ioengine=psync", "--numjobs=2", f"--size={half}", f"--offset_increment={half}"]
    else:
        command += ["--ioengine=io_uring", f"--iodepth={depth}", "--direct=1", f"--size={total}"]
    if operation == "write":
        command.append("--end_fsync=1")
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    job: dict[str, int] = json.loads(ran.stdout)["jobs"][0][operation]
    return job["io_bytes"] / (job["runtime"] / 1e3) / 1e9


def memcpy(total: int = 256 * MIB) -> float:
    """GB per second that one thread copies, far beyond the caches."""
    # Here, since numpy starts threads: a gateway must have none before it has blocked its signals.
    import numpy as np

    source = np.ones(total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    seconds = 0.0
    # Once before, since memory that was never touched costs far more.
    for _ in range(2):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds = time.perf_counter() - begun
    return total / 1e9 / seconds
