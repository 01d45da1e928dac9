"""LMCache's own storage manager with several L2 adapters, in a process of its own.

    python failed_loads.py store|load ADAPTERS_JSON COUNT OBJECT_BYTES

As `tests/e2e/storage_process.py`, but ADAPTERS_JSON is an array; after `load` it waits until nothing is on its way to an
adapter any more, so that what a failed load brings about is there to be seen.
"""

import argparse
import json
import sys
import time

import torch
from lmcache.v1.distributed import api
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.e2e.storage_process import L1_BYTES, key, prefetch, store

SETTLED_S = 2.0
"""How long nothing may happen before what a failed load leads to is over."""


def open_manager(adapters: list[dict[str, object]]) -> StorageManager:
    words = [word for adapter in adapters for word in ("--l2-adapter", json.dumps(adapter))]
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    memory = L1MemoryManagerConfig(
        size_in_bytes=L1_BYTES, use_lazy=False, init_size_in_bytes=L1_BYTES, shm_name=""
    )
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=parse_args_to_l2_adapters_config(parser.parse_args(words)),
        )
    )


def settle(manager: StorageManager) -> None:
    """Return when no store has been on its way for a while."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < SETTLED_S:
        status = manager.report_status()
        stores = status["store_controller"]
        if "pending_keys_count" not in stores:
            stores = next(iter(status["store_controllers"].values()))
        if stores["pending_keys_count"] or stores["in_flight_task_count"]:
            quiet_since = time.monotonic()
        time.sleep(0.02)


def delay_deletes(manager: StorageManager) -> None:
    """Delete failed keys late, where LMCache deletes them: a race that its stores of them otherwise mostly lose."""
    l1 = getattr(manager, "_l1_manager", None)
    if l1 is None:
        return
    delete = l1.delete

    def late(*arguments: object) -> object:
        time.sleep(SETTLED_S / 2)
        return delete(*arguments)

    l1.delete = late


def main() -> None:
    mode, adapters, count, size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    layout = api.MemoryLayoutDesc(shapes=[torch.Size([size])], dtypes=[torch.uint8])
    manager = open_manager(adapters)
    if mode == "store":
        said = store(manager, count, size, layout)
    else:
        delay_deletes(manager)
        hits, l1 = prefetch(manager, [key(index) for index in range(count)], layout)
        said = {"hits": hits, "l1": l1}
    settle(manager)
    manager.close()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
