"""Keeps LMCache's warnings about refused stores in bounds.

LMCache logs every refused store with all its keys. While a gateway is down under load that is a line per request; the
plugin counts and logs the cause itself.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Final

LOGGER: Final = "lmcache.v1.distributed.storage_controllers.store_controller"
"""LMCache's logger, and the module that has it."""

START: Final = "Store task "
"""How the message begins."""

QUIET_S: Final = 60.0
"""Time between two of those lines."""


class RefusedStores(logging.Filter):
    """Lets the first warning through whole, then one in `quiet_s` seconds with the number of those that were not shown."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        super().__init__()
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._last: float | None = None
        self._unsaid = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written; a repeated one is shortened to a count."""
        if not (isinstance(record.msg, str) and record.msg.startswith(START) and "failed" in record.msg):
            return True
        now = time.monotonic()
        with self._lock:
            if self._last is not None and now - self._last < self._quiet_s:
                self._unsaid += 1
                return False
            first, self._last = self._last is None, now
            unsaid, self._unsaid = self._unsaid, 0
        if not first:
            record.msg, record.args = f"{unsaid + 1} store tasks failed since the last such line", None
        return True


def bound_refused_stores() -> bool:
    """Install the filter, once per process; True when it was not there and LMCache is."""
    logger = logging.getLogger(LOGGER)
    if LOGGER not in sys.modules or any(isinstance(each, RefusedStores) for each in logger.filters):
        return False
    logger.addFilter(RefusedStores())
    return True
