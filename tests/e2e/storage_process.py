"""LMCache's own storage manager in a process of its own, so that a test can end it as it likes.

    python storage_process.py store|load ADAPTER_JSON COUNT OBJECT_BYTES

`store` puts COUNT objects through L1 into L2 and says `{"stored": COUNT}` once every one was acknowledged, by the
statistics that the adapter writes to its `stats_path`. `load` looks the
same objects up, with an L1 that never held them, and says `{"hits": ..., "l1": ..., "wrong": ...}`: objects found, how
many of them L1 already had, and how many whose bytes are not what was stored. Both then wait until their stdin closes.
Runs with each supported LMCache version.
"""

import argparse
import ctypes
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy
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

L1_BYTES = 256 << 20
DEADLINE_S = 120


def open_manager(adapter: str) -> StorageManager:
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    adapters = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", adapter]))
    memory = L1MemoryManagerConfig(
        size_in_bytes=L1_BYTES, use_lazy=False, init_size_in_bytes=L1_BYTES, shm_name=""
    )
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=adapters,
        )
    )


def key(index: int) -> api.ObjectKey:
    digest = hashlib.blake2b(f"object {index}".encode(), digest_size=32).digest()
    return api.ObjectKey(chunk_hash=digest, model_name="org/model", kv_rank=0x01000100)


def contents(index: int, size: int) -> bytes:
    return numpy.random.default_rng(index).bytes(size)


def view(memory: Any) -> memoryview:
    return memoryview(memory.byte_array).cast("B")


def prefetch(
    manager: StorageManager, keys: list[api.ObjectKey], layout: api.MemoryLayoutDesc
) -> tuple[int, int]:
    """Returns how many of `keys` are in L1 now, and how many were before."""
    if hasattr(api, "PrefetchTaskSpec"):
        groups = [api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=layout)]
        handle = manager.submit_prefetch_task(api.PrefetchTaskSpec(key_groups=groups))
    else:
        handle = manager.submit_prefetch_task(
            api.PrefetchRequestSpec(keys=keys, group_layout_descs={0: layout})
        )
    if not manager.wait_prefetch_status(handle, DEADLINE_S):
        raise TimeoutError(f"LMCache's prefetch has no result after {DEADLINE_S} s")
    result = manager.query_prefetch_status(handle)
    if hasattr(result, "hit_cells"):
        return result.hit_cells[0].popcount(), result.l1_hit_cells[0].popcount()
    return result.popcount(), len(handle.l1_found_indices)


def acknowledged(stats: Path) -> int:
    """Stores that the plugin has acknowledged so far."""
    if not stats.exists():
        return 0
    counted = json.loads(stats.read_text())
    return sum(counted[f"store_{outcome}"] for outcome in ("stored", "skipped", "deduped"))


def store(
    manager: StorageManager, count: int, size: int, layout: api.MemoryLayoutDesc, stats: Path | None = None
) -> dict[str, int]:
    keys = [key(index) for index in range(count)]
    mode = () if hasattr(api, "PrefetchTaskSpec") else ("new",)
    reserved = manager.reserve_write(keys, layout, *mode)
    assert len(reserved) == count, f"L1 took {len(reserved)} of {count} objects"
    for index, each in enumerate(keys):
        view(reserved[each])[:] = contents(index, size)
    manager.finish_write(keys)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        status = manager.report_status()
        stores = status["store_controller"]
        stores = (
            stores if "pending_keys_count" in stores else next(iter(status["store_controllers"].values()))
        )
        l1 = status["l1_manager"]
        idle = not (stores["pending_keys_count"] or stores["in_flight_task_count"] or l1["read_locked_count"])
        # Idle is also who has not begun: LMCache takes up what was written a moment later.
        if idle and (stats is None or acknowledged(stats) == count):
            return {"stored": count}
        time.sleep(0.01)
    raise TimeoutError(f"stores still unanswered after {DEADLINE_S} s")


def load(manager: StorageManager, count: int, size: int, layout: api.MemoryLayoutDesc) -> dict[str, int]:
    keys = [key(index) for index in range(count)]
    hits, l1 = prefetch(manager, keys, layout)
    wrong = 0
    with manager.read_prefetched_results(keys[:hits]) as objects:
        assert objects is not None, "an object that was reported as a hit is not in L1"
        for index, each in enumerate(objects):
            wrong += bytes(view(each)) != contents(index, size)
    manager.finish_read_prefetched(keys[:hits])
    return {"hits": hits, "l1": l1, "wrong": wrong}


def main() -> None:
    mode, adapter, count, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ends with the test
    layout = api.MemoryLayoutDesc(shapes=[torch.Size([size])], dtypes=[torch.uint8])
    manager = open_manager(adapter)
    if mode == "store":
        stats = Path(json.loads(adapter)["adapter_params"]["stats_path"])
        outcome = store(manager, count, size, layout, stats)
    else:
        outcome = load(manager, count, size, layout)
    print(json.dumps(outcome), flush=True)
    sys.stdin.read()
    manager.close()


if __name__ == "__main__":
    main()
