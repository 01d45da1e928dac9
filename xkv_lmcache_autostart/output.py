"""A child's output: passed on line by line, its last lines kept for the report of a failure."""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from typing import Final

TAIL_LINES: Final = 20
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;]*m")
_READ_BYTES: Final = 65536
_PENDING_BYTES: Final = 2**20


def write_patiently(target: int, data: bytes, patience_s: float) -> bool:
    """Write to a descriptor whose reader may be slow or gone: False if it did not take all of it in time."""
    poller = select.poll()
    poller.register(target, select.POLLOUT)
    deadline = time.monotonic() + patience_s
    while data:
        # A pipe that polls as writable takes PIPE_BUF bytes at once.
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        try:
            data = data[os.write(target, data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


class Relay:
    """Passes what arrives on a pipe on to one of our own descriptors, in whole lines where possible.

    Neither side may block the launcher: it writes only what the target takes at once and stops reading
    while too much is pending, so that a child whose output nobody reads waits, as it would without a
    launcher.
    """

    def __init__(self, source: int, target: int, tail: deque[str]) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.target = target
        self.open = True
        self._tail = tail
        self._partial = b""
        self._pending = b""
        self._lost_target = False

    def wants_read(self) -> bool:
        return self.open and len(self._pending) < _PENDING_BYTES

    def wants_write(self) -> bool:
        return bool(self._pending)

    def read(self) -> None:
        """Take what has arrived."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._take(self._partial + b"\n" if self._partial else b"")
            self._partial = b""
            self.close()
            return
        lines, newline, self._partial = (self._partial + data).rpartition(b"\n")
        self._take(lines + newline)
        if len(self._partial) > _READ_BYTES:
            self._take(self._partial)
            self._partial = b""

    def write(self) -> None:
        """Pass on as much as a pipe that is ready takes without blocking."""
        if not self._pending:
            return
        piece = self._pending[: select.PIPE_BUF]
        if len(self._pending) > len(piece) and b"\n" in piece:
            piece = piece[: piece.rindex(b"\n") + 1]
        try:
            written = os.write(self.target, piece)
        except BlockingIOError:
            return
        except OSError:
            # Nobody reads us any more; the child is to go on all the same.
            self._lost_target = True
            self._pending = b""
            return
        self._pending = self._pending[written:]

    def close(self) -> None:
        """Stop reading; what is pending can still be written."""
        if self.open:
            self.open = False
            os.close(self.source)

    def _take(self, lines: bytes) -> None:
        plain = _COLOUR.sub(b"", lines)
        self._tail.extend(line.decode(errors="replace") for line in plain.splitlines() if line.strip())
        if not self._lost_target:
            self._pending += lines
