"""The connectors' metrics ports: one per address, however many connectors of a process name it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from xkv_lmcache.metrics import CONNECTORS, HasStats
from xkv_lmcache.metrics_http import MetricsServer, Source

_lock = threading.Lock()
_servers: dict[tuple[str, int], MetricsServer] = {}


def show(connector: HasStats) -> Callable[[], None]:
    """Show the series of `connector`; the function that is returned ends that."""
    # By its label: a function that knows the connector would keep it alive.
    return partial(CONNECTORS.remove, CONNECTORS.add(connector))


def listen(host: str, port: int) -> None:
    """Serve the connectors of this process on `host`:`port` from now on; nothing happens the second time.

    Raises `OSError` when it cannot be listened on.
    """
    with _lock:
        if (host, port) not in _servers:
            _servers[host, port] = MetricsServer(host, port, Source(CONNECTORS, _status, _troubles))


def _status() -> dict[str, Any]:
    return {"connectors": {str(index): state for index, state in CONNECTORS.states().items()}}


def _troubles() -> list[str]:
    states = CONNECTORS.states()
    if not states:
        return ["there is no connector"]
    return [
        f"connector {index}: {reason}"
        for index, state in states.items()
        for reason in state["health"]["reasons"]
    ]
