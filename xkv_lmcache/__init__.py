"""Persistent second tier (L2) for LMCache's multiprocess server.

LMCache's `native_plugin` adapter makes an `XkvL2Connector` from `adapter_params` and drives it: it submits batches, waits
on `event_fd()` and drains the answers. Needs neither LMCache nor vLLM to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xkv_lmcache._native import probe_store
    from xkv_lmcache.connector import XkvL2Connector

__all__ = ["XkvL2Connector", "probe_store"]


def __getattr__(name: str) -> object:
    """Import what needs the native module when it is asked for: settings and help work without it."""
    if name == "XkvL2Connector":
        from xkv_lmcache.connector import XkvL2Connector

        return XkvL2Connector
    if name == "probe_store":
        from xkv_lmcache._native import probe_store

        return probe_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
