"""Child processes: how they are started, found and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import psutil

from xkv_lmcache_autostart.output import TAIL_LINES, Relay

MARK: Final = "XKV_LAUNCHER"
"""The variable by which the watchdog recognises descendants that left their process group."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A child that leads a process group of its own."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = popen.pid
        self.exit_code: int | None = None
        """As `os.waitstatus_to_exitcode` gives it, once the child was reaped."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.relays: list[Relay] = []
        for pipe, target in ((popen.stdout, 1), (popen.stderr, 2)):
            if pipe is not None:
                self.relays.append(Relay(os.dup(pipe.fileno()), target, self.tail))
                pipe.close()
        self._popen = popen

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def reaped(self, exit_code: int) -> None:
        """Note that the child was reaped elsewhere."""
        self.exit_code = exit_code
        self._popen.returncode = exit_code

    def send(self, number: int) -> None:
        """Send a signal to the child itself, if it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def new_mark() -> str:
    """A value of `MARK` that no other launcher has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process, as they do of PID 1."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Name this process as `ps` and `top` show it; at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def spawn(
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    relay: bool = False,
    foreground: bool = False,
) -> Child:
    """Start a child in a process group of its own that gets TERM when this process dies.

    `relay`: its output goes through pipes that `Child.relays` passes on, and it has no standard input.
    `foreground`: it becomes the terminal's foreground group, where this process is in it.
    Raises `OSError` where `argv` cannot be executed.
    """
    launcher = os.getpid()
    take_terminal = foreground and _in_foreground()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGTERM)
        if take_terminal:
            give_terminal(os.getpid())

    return Child(
        name,
        subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL if relay else None,
            stdout=subprocess.PIPE if relay else None,
            stderr=subprocess.PIPE if relay else None,
            process_group=0,
            preexec_fn=in_child,  # noqa: PLW1509 (there are no threads)
        ),
    )


def give_terminal(group: int) -> None:
    """Make `group` the terminal's foreground group; no effect without a terminal."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, group)
    finally:
        signal.signal(signal.SIGTTOU, before)


def reap() -> list[tuple[int, int]]:
    """Reap every child that has ended: process and exit code (negative for a signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """The living descendants of process `pid`, this one by default; what ended unreaped does not live."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if _lives(process)]


def members(groups: Iterable[int], mark: str) -> list[psutil.Process]:
    """The living processes of these process groups, and those that carry `mark` in their environment."""
    wanted = set(groups)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            ours = os.getpgid(process.pid) in wanted or _carries(process, mark)
            if ours and process.pid != os.getpid() and _lives(process):
                found.append(process)
    return found


def send(process: psutil.Process, number: int) -> None:
    """Send a signal, if the process is still the one that was found."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def once(action: Callable[[psutil.Process], None]) -> Callable[[Iterable[psutil.Process]], None]:
    """Apply `action` to each process once, however often it is found."""
    seen: set[psutil.Process] = set()

    def apply(found: Iterable[psutil.Process]) -> None:
        for process in found:
            if process not in seen:
                seen.add(process)
                action(process)

    return apply


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as environ:
            return f"{MARK}={mark}".encode() in environ.read().split(b"\0")
    except OSError:
        return False


def _in_foreground() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
