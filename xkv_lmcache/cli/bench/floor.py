"""A connector that does nothing: what LMCache's `native_plugin` wrapper itself costs."""

from __future__ import annotations

import itertools
import os
from typing import Any

Answer = tuple[int, bool, str, list[bool] | None]


class Connector:
    """Answers inside submit. Knows which keys were stored, moves no byte."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ids = itertools.count(1)
        self._keys: set[str] = set()
        self._done: list[Answer] = []

    def event_fd(self) -> int:
        return self._event

    def _answer(self, results: list[bool] | None) -> int:
        number = next(self._ids)
        self._done.append((number, True, "", results))
        os.eventfd_write(self._event, 1)
        return number

    def submit_batch_set(self, keys: list[str], views: list[Any]) -> int:
        self._keys.update(keys)
        return self._answer(None)

    def submit_batch_get(self, keys: list[str], views: list[Any]) -> int:
        return self._answer([True] * len(keys))

    def submit_batch_exists(self, keys: list[str]) -> int:
        known = self._keys
        return self._answer([key in known for key in keys])

    def submit_batch_delete(self, keys: list[str]) -> int:
        self._keys.difference_update(keys)
        return self._answer([True] * len(keys))

    def drain_completions(self) -> list[Answer]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
