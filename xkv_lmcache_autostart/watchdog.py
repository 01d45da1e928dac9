"""The watchdog: ends the children when the launcher dies without doing it, by kill -9 for example.

It is a process of its own that holds one end of a pipe. Through it the launcher names the process groups
it has started; the pipe's end means that the launcher is gone. What still runs then has the grace to
follow the TERM that the kernel sent the groups' leaders (their parent-death signal), and is killed after
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

from xkv_lmcache_autostart import processes
from xkv_lmcache_autostart.output import write_patiently

_POLL_S: Final = 0.05
_KILL_S: Final = 5.0


class Watchdog:
    """The launcher's side."""

    def __init__(self, grace_s: float, mark: str) -> None:
        self._grace_s = grace_s
        self._mark = mark
        self._groups: set[int] = set()
        self._start()

    def watch(self, group: int) -> None:
        """End this process group when the launcher dies."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has ended, and its number may become somebody else's."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def restart(self) -> None:
        """Replace a watchdog that has died."""
        os.close(self._pipe)
        self._start()
        for group in self._groups:
            self._tell(f"+{group}\n")

    def close(self) -> None:
        """End it; there is nothing left that it would have to end."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._pipe)

    def _start(self) -> None:
        reader, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run(reader, self._grace_s, self._mark)
            finally:
                os._exit(0)
        os.close(reader)

    def _tell(self, line: str) -> None:
        # If it has died, `restart` tells the new one everything.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())


def _run(pipe: int, grace_s: float, mark: str) -> None:
    """The watchdog's life. It must outlive signals meant for the launcher's group or terminal."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    processes.set_name("xkv-watchdog")
    _keep_only(pipe)
    groups = _read_groups(pipe)
    if groups:
        _end(groups, grace_s, mark)


def _keep_only(pipe: int) -> None:
    """Close every descriptor but stderr and the pipe, so that nothing is held open for others."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, pipe):
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def _read_groups(pipe: int) -> set[int]:
    """The groups that were watched when the pipe ended."""
    text = b""
    groups: set[int] = set()
    while data := os.read(pipe, 4096):
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            change = groups.add if line[:1] == b"+" else groups.discard
            change(int(line[1:]))
    return groups


def _end(groups: set[int], grace_s: float, mark: str) -> None:
    write_patiently(2, b"xkv_lmcache_autostart: the launcher was killed; ending its children\n", 0.1)
    # The leaders have the kernel's TERM; a second one would cut their clean-up short. The rest gets it
    # when they are gone.
    terminate = processes.once(lambda process: processes.send(process, signal.SIGTERM))
    deadline = time.monotonic() + grace_s
    while (found := processes.members(groups, mark)) and time.monotonic() < deadline:
        if not any(process.pid in groups for process in found):
            terminate(found)
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_S
    while (found := processes.members(groups, mark)) and time.monotonic() < deadline:
        for process in found:
            processes.send(process, signal.SIGKILL)
        time.sleep(_POLL_S)
