"""What the store's I/O engine and fio move to and from one drive, in turns."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xkv_lmcache.cli.bench.target import MIB, job_of
from xkv_lmcache.cli.complaint import reason
from xkv_lmcache.cli.text import byte_text

if TYPE_CHECKING:
    from xkv_lmcache._native import Trial

OPERATIONS = {
    "read": "sequential reads",
    "randread": "random reads",
    "write": "sequential writes",
    "randwrite": "random writes",
}
"""By fio's word."""

ENGINES = {"uring": "io_uring", "pool": "pool"}
"""Names of those of ours, by their word in the settings."""

FIO = "fio"

ENDS = 2 * MIB
"""Of a drive, left alone."""


class TrialError(Exception):
    """What went wrong, for people."""


@dataclass(frozen=True)
class Case:
    """What everybody does in turns."""

    operation: str
    fragment_bytes: int
    depth: int


Figures = dict[str, dict[str, float]]
"""By engine, or fio: `gb_per_s` and `cpu_s_per_gb`."""

Round = dict[Case, Figures]


@contextmanager
def drive(path: Path, span: int, *, read_only: bool, force: bool) -> Iterator[Trial]:
    """The drive or file at `path`, or a file without a name in that folder, which is gone whatever happens.

    Raises:
        TrialError: what the native module says, also while the drive is used.
    """
    from xkv_lmcache._native import Trial

    opened = str(path)
    try:
        with ExitStack() as stack:
            if path.is_dir():
                if span + ENDS > (free := shutil.disk_usage(path).free):
                    raise TrialError(f"{path}: {byte_text(free)} are free; lower --mib, or free some space")
                file = stack.enter_context(tempfile.TemporaryFile(dir=path))
                file.truncate(span + ENDS)
                # Ours, whatever the filesystem says of it.
                opened, force = f"/proc/self/fd/{file.fileno()}", True
            trial = Trial(opened, span_bytes=span, read_only=read_only, force=force)
            stack.callback(trial.close)
            yield trial
    except (OSError, ValueError) as error:
        raise TrialError(reason(error).replace(opened, str(path))) from error


def refusal(trial: Trial, engine: str) -> OSError | None:
    """Why this machine does not let us have `engine`; None where it does."""
    try:
        trial.measure("read", "sequential", MIB, 1, engine, 0)
    except OSError as error:
        return error
    return None


def turns(
    trial: Trial, cases: list[Case], names: list[str], seconds: float, first: int, fio_engine: str
) -> Round:
    """Everybody's figures of one round. Within each case they work in turns, and in each round another one begins.

    Raises:
        OSError: the drive fails.
        TrialError: fio does.
    """
    figures: Round = {}
    first %= len(names)
    for case in cases:
        figures[case] = {}
        for name in names[first:] + names[:first]:
            if name == FIO:
                figures[case][name] = fio(trial, case, seconds, fio_engine)
            else:
                figures[case][name] = ours(trial, case, seconds, name)
    return figures


def ours(trial: Trial, case: Case, seconds: float, engine: str) -> dict[str, float]:
    """The figures of one of our engines."""
    operation = "read" if case.operation.endswith("read") else "write"
    order = "random" if case.operation.startswith("rand") else "sequential"
    moved, taken, cpu, _ = trial.measure(operation, order, case.fragment_bytes, case.depth, engine, seconds)
    return _figures(moved, taken, cpu)


def fio(trial: Trial, case: Case, seconds: float, engine: str) -> dict[str, float]:
    """Those of fio, in the same cache mode; its CPU time is what it says itself. It holds the drive's lock, too, so that
    nobody else has the drive before fio ends, even if we are killed.

    Raises:
        TrialError: with its last words.
    """
    start, span = trial.span()
    total = span // case.fragment_bytes * case.fragment_bytes
    reads, descriptor, memory = case.operation.endswith("read"), trial.fileno(), trial.in_memory()
    path = Path(f"/proc/self/fd/{descriptor}")
    command = ["fio", "--output-format=json"]
    command += job_of(path, case.operation, total, case.fragment_bytes, case.depth, memory=memory)
    command += ["--thread", "--norandommap", f"--offset={start}", "--readonly" if reads else "--end_fsync=1"]
    command += ["--time_based", f"--runtime={round(seconds * 1000)}ms"]
    if not memory:
        command += [f"--ioengine={engine}", f"--direct={trial.is_direct():d}"]
    ran = subprocess.run(command, capture_output=True, text=True, pass_fds=[descriptor], check=False)
    if ran.returncode:
        raise TrialError(f"fio failed: {(ran.stderr or ran.stdout).strip()[-400:]}")
    job = json.loads(ran.stdout)["jobs"][0]
    done = job["read" if reads else "write"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return _figures(done["io_bytes"], done["runtime"] / 1e3, cpu)


def _figures(moved: int, seconds: float, cpu: float) -> dict[str, float]:
    gb = moved / 1e9
    return {"gb_per_s": gb / seconds if seconds else 0.0, "cpu_s_per_gb": cpu / gb if gb else 0.0}
