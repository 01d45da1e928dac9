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


def fio_mixed(folder: Path, total: int, block: int, depth: int) -> dict[str, float]:
    """What fio's reads and writes get of the file of :func:`fio` when both go on for a second, in `COLUMNS`' keys:
    GB per second of each, and the reads' share of what reads alone get."""
    path, memory = folder / "fio", is_tmpfs(folder)
    second = ["--time_based", "--runtime=1"]
    jobs = [
        job_of(path, operation, total, block, depth, memory=memory) + second
        for operation in ("read", "write")
    ]
    (alone,) = _run(jobs[:1])
    read, write = _run(jobs)
    return {"mixed_load": read, "mixed_store": write, "kept": read / alone}


def _fio(path: Path, operation: str, total: int, block: int, depth: int, *, memory: bool) -> float:
    job = job_of(path, operation, total, block, depth, memory=memory)
    (rate,) = _run([job + (["--end_fsync=1"] if operation == "write" else [])])
    return rate


def job_of(path: Path, operation: str, total: int, block: int, depth: int, *, memory: bool) -> list[str]:
    """fio's arguments for a job that moves `total` bytes of the file at `path`."""
    job = [f"--name={operation}", f"--filename={path}", f"--rw={operation}", f"--bs={block}"]
    job += ["--randrepeat=0", "--overwrite=1", "--group_reporting"]
    if memory and (half := total // 2 // block * block):
        return job + ["--ioengine=psync", "--numjobs=2", f"--size={half}", f"--offset_increment={half}"]
    engine = ["--ioengine=psync"] if memory else ["--ioengine=io_uring", f"--iodepth={depth}", "--direct=1"]
    return [*job, *engine, f"--size={total}"]


def _run(jobs: list[list[str]]) -> list[float]:
    """GB per second of each of the jobs, which run at once."""
    command = ["fio", "--output-format=json"]
    for job in jobs:
        command += [*job, "--new_group"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rates = []
    for job in json.loads(ran.stdout)["jobs"]:
        did = job[job["jobname"]]
        rates.append(did["io_bytes"] / (did["runtime"] / 1e3) / 1e9)
    return rates


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
