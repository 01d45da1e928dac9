"""A blocking client of the connector, with buffers like LMCache's."""

import ctypes
import itertools
import json
import mmap
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy

from xkv_lmcache import XkvL2Connector

MARGIN = bytes(range(64))
"""What lies before and behind every buffer."""

Answer = tuple[int, bool, str, list[bool] | None]


def contents(seed: int, size: int) -> bytes:
    return numpy.random.default_rng(seed).bytes(size)


def behind_a_page(address: int, margin: int, shift: int) -> int:
    """The first offset of at least `margin` in memory at `address` that is `shift` bytes behind the start of a page."""
    return margin + (shift - margin - address) % mmap.PAGESIZE


class Buffer:
    """One object in L1: a `"<B"` view into a larger arena, as LMCache hands them out.

    Every second one begins with a page, as LMCache's do: its whole blocks go straight from and to drives. The others go
    through slots.
    """

    _numbers = itertools.count()

    def __init__(self, data: bytes) -> None:
        size, shift = len(data), next(Buffer._numbers) % 2 * len(MARGIN)
        self._arena = (ctypes.c_ubyte * (size + 2 * len(MARGIN) + mmap.PAGESIZE))()
        self._start = behind_a_page(ctypes.addressof(self._arena), len(MARGIN), shift)
        self.view = memoryview((ctypes.c_ubyte * size).from_buffer(self._arena, self._start))
        assert self.view.format == "<B"
        self._framed()[:] = MARGIN + data + MARGIN

    def _framed(self) -> memoryview:
        """It and what is beside it."""
        around = slice(self._start - len(MARGIN), self._start + len(self.view) + len(MARGIN))
        return memoryview(self._arena).cast("B")[around]

    def content(self) -> bytes:
        framed = bytes(self._framed())
        assert framed.startswith(MARGIN) and framed.endswith(MARGIN), "written beside the buffer"
        return framed[len(MARGIN) : -len(MARGIN)]

    @classmethod
    def blank(cls, size: int) -> "Buffer":
        return cls(b"\xee" * size)


class Client:
    """Submits, and waits for the answer; everything that is drained must be well-formed and come once."""

    def __init__(self, **params: Any) -> None:
        self.connector = XkvL2Connector(**params)
        self._answers: dict[int, Answer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def drain(self) -> None:
        for answer in self.connector.drain_completions():
            check_form(answer)
            assert answer[0] not in self._answers, "answered twice"
            self._answers[answer[0]] = answer

    def answer(self, future: int, timeout: float = 60) -> Answer:
        deadline = time.monotonic() + timeout
        while future not in self._answers:
            readable, _, _ = select.select([self.connector.event_fd()], [], [], deadline - time.monotonic())
            assert readable, f"{future} was not answered in {timeout} s: {self.connector.stats()}"
            self.drain()
        return self._answers.pop(future)

    def bools(self, future: int) -> list[bool]:
        bools = self.answer(future)[3]
        assert bools is not None
        return bools

    def set(self, objects: dict[str, bytes]) -> bool:
        buffers = [Buffer(data) for data in objects.values()]
        future = self.connector.submit_batch_set(list(objects), [buffer.view for buffer in buffers])
        _, ok, error, bools = self.answer(future)
        assert bools is None and ok == (not error)
        return ok

    def get(
        self, sizes: dict[str, int], submitted: Callable[[], None] = lambda: None
    ) -> dict[str, bytes | None]:
        """What was loaded, `submitted` called before it is waited for."""
        buffers = [Buffer.blank(size) for size in sizes.values()]
        future = self.connector.submit_batch_get(list(sizes), [buffer.view for buffer in buffers])
        submitted()
        found = zip(sizes, buffers, self.bools(future), strict=True)
        return {key: buffer.content() if loaded else None for key, buffer, loaded in found}

    def exists(self, keys: list[str]) -> list[bool]:
        return self.bools(self.connector.submit_batch_exists(keys))

    def delete(self, keys: list[str]) -> list[bool]:
        return self.bools(self.connector.submit_batch_delete(keys))


def check_form(answer: object) -> None:
    """LMCache's demultiplexer thread dies of anything but this."""
    assert type(answer) is tuple and len(answer) == 4
    future, ok, error, bools = answer
    assert type(future) is int and type(ok) is bool and type(error) is str
    assert bools is None or (type(bools) is list and all(type(each) is bool for each in bools))


def stats_file(path: Path) -> dict[str, Any]:
    counted: dict[str, Any] = json.loads(path.read_text())
    return counted
