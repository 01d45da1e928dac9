"""Stores one object in an embedded store and loads it again after a restart of the store: does a wheel work at all?

    python3 scripts/store_and_load.py FOLDER

Needs the installed wheel and nothing else. Exit code 0 and one line when the bytes are the same.
"""

from __future__ import annotations

import select
import sys
from typing import Any

from xkv_lmcache import XkvL2Connector

KEY = "model@1000100@0@" + "ab" * 32
DATA = bytes(range(256)) * 4096


def ask(connector: XkvL2Connector, future: int) -> tuple[Any, ...]:
    """The completion of `future`, the only one submitted."""
    while True:
        readable, _, _ = select.select([connector.event_fd()], [], [], 30)
        if not readable:
            sys.exit(f"operation {future} was not answered within 30 s")
        for completion in connector.drain_completions():
            if completion[0] == future:
                return completion


def main(folder: str) -> None:
    params = {"store": folder, "store_gb": 0.25}
    store = XkvL2Connector(**params)
    completion = ask(store, store.submit_batch_set([KEY], [memoryview(DATA)]))
    store.close()
    if not completion[1]:
        sys.exit(f"the store failed: {completion[2]}")
    store = XkvL2Connector(**params)
    found = bytearray(len(DATA))
    completion = ask(store, store.submit_batch_get([KEY], [memoryview(found)]))
    store.close()
    if completion[3] != [True] or found != DATA:
        sys.exit(f"the load failed: {completion}")
    print(f"{len(DATA)} bytes stored, and loaded again after a restart of the store")


if __name__ == "__main__":
    main(sys.argv[1])
