"""The process that `xkv bench growth` measures and kills: one connector on a store of small objects.

It drives the connector itself: LMCache's wrapper adds Python to every key, the same at every size, which would hide what
is to be seen here. Lookups, which are little else than that, are measured through the wrapper as well.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import resource
import select
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

OBJECT_BYTES = 4096
"""One fragment, the smallest there is."""

BATCH = 64
"""Keys of every measured batch."""

MODEL = "meta-llama/Llama-3.1-8B-Instruct"

FILL_BATCH, FILL_IN_FLIGHT = 512, 4
PATIENCE_S = 120.0

ABSENT, EXTRA = 1 << 40, 1 << 41
"""First number of the objects that are never stored, and of those that samples store and delete."""

Submit = Callable[[list[str], list[memoryview]], int]


def chunk_hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def key(number: int) -> str:
    """The key of an object, as LMCache's wrapper writes it."""
    return f"{MODEL}@00000000@0@{chunk_hash(number).hex()}"


def keep(_: list[str]) -> None:
    """Leaves a sample's keys as they are."""


def sample(
    samples: int,
    keys_of: Callable[[], list[Any]],
    action: Callable[[list[Any]], int],
    after: Callable[[list[Any]], object],
    wanted: int,
) -> float:
    """Median of the microseconds per key that `action` takes. Each time with keys of its own, and `after` is not timed.

    Raises:
        RuntimeError: it did not go well for `wanted` keys.
    """
    times = []
    for _ in range(samples + 1):
        keys = keys_of()
        begun = time.perf_counter()
        good = action(keys)
        times.append((time.perf_counter() - begun) * 1e6 / len(keys))
        if good != wanted:
            raise RuntimeError(f"{good} of {len(keys)} keys went well, not {wanted}")
        after(keys)
    # The first one is the first to touch memory and slots.
    return statistics.median(times[1:])


class Area:
    """Page-aligned memory for objects."""

    def __init__(self, objects: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, objects * OBJECT_BYTES))
        starts = range(0, objects * OBJECT_BYTES, OBJECT_BYTES)
        self.views = [self._memory[start : start + OBJECT_BYTES] for start in starts]

    def fill(self, byte: bytes) -> None:
        self._memory[:] = byte * len(self._memory)


class Contents:
    """What an object holds: bytes that do not repeat, and its number."""

    def __init__(self) -> None:
        self._noise = [random.Random(turn).randbytes(OBJECT_BYTES - 8) for turn in range(BATCH)]

    def of(self, number: int) -> bytes:
        return number.to_bytes(8, "little") + self._noise[number % BATCH]


class Wrapper:
    """LMCache's wrapper of native connectors around ours."""

    def __init__(self, connector: Any) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter
        from lmcache.v1.platform import consume_fd

        self._adapter: Any = NativeConnectorL2Adapter(connector)
        self._consume_fd = consume_fd
        self._layout = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}
        self._answered = select.poll()
        self._answered.register(self._adapter.get_lookup_and_lock_event_fd(), select.POLLIN)

    def keys(self, numbers: Sequence[int]) -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey(chunk_hash=chunk_hash(number), model_name=MODEL, kv_rank=0) for number in numbers]

    def hits(self, keys: list[Any]) -> int:
        task = self._adapter.submit_lookup_and_lock_task(keys, self._layout)
        while (found := self._adapter.query_lookup_and_lock_result(task)) is None:
            if not self._answered.poll(PATIENCE_S * 1e3):
                raise RuntimeError(f"no answer within {PATIENCE_S:g} s")
            self._consume_fd(self._adapter.get_lookup_and_lock_event_fd())
        return int(found.popcount())

    def unlock(self, keys: list[Any]) -> None:
        self._adapter.submit_unlock(keys)


class GrowthWorker:
    """A connector, and what is measured of it."""

    def __init__(self, store: str, store_gb: float) -> None:
        from xkv_lmcache import XkvL2Connector

        cpu, begun = time.process_time(), time.perf_counter()
        self._connector = XkvL2Connector(
            store=store, store_gb=store_gb, fragment_bytes=OBJECT_BYTES, namespace="bench"
        )
        self._poll = select.poll()
        self._poll.register(self._connector.event_fd(), select.POLLIN)
        self._hits([key(ABSENT)])
        self.opened = {"open_s": time.perf_counter() - begun, "open_cpu_s": time.process_time() - cpu}
        self._contents = Contents()
        self._random = random.Random(1)
        self._area = Area(BATCH)
        self._extra = EXTRA
        self._wrapper: Wrapper | None = None

    def _drain(self) -> list[tuple[int, bool, str, list[bool] | None]]:
        if not self._poll.poll(PATIENCE_S * 1e3):
            raise RuntimeError(f"no answer within {PATIENCE_S:g} s")
        return self._connector.drain_completions()

    def _answer(self, task: int) -> list[bool] | None:
        """What the only task under way brought."""
        while not (done := self._drain()):
            pass
        ((answered, good, error, results),) = done
        if answered != task or not good:
            raise RuntimeError(f"a task failed: {error}")
        return results

    def _hits(self, keys: list[str]) -> int:
        return sum(self._answer(self._connector.submit_batch_exists(keys)) or [])

    def _load(self, keys: list[str]) -> int:
        return sum(self._answer(self._connector.submit_batch_get(keys, self._area.views)) or [])

    def _store(self, keys: list[str]) -> int:
        self._answer(self._connector.submit_batch_set(keys, self._area.views))
        return len(keys)

    def _write(self, views: Sequence[memoryview], numbers: Sequence[int]) -> None:
        for view, number in zip(views, numbers, strict=False):
            view[:] = self._contents.of(number)

    def fill(self, first: int, last: int) -> dict[str, float]:
        """Stores the objects of these numbers."""
        areas = [Area(FILL_BATCH) for _ in range(FILL_IN_FLIGHT)]
        running: dict[int, Area] = {}
        ranges = [range(at, min(at + FILL_BATCH, last)) for at in range(first, last, FILL_BATCH)]
        begun = time.perf_counter()
        while ranges or running:
            while ranges and areas:
                numbers, area = ranges.pop(0), areas.pop()
                self._write(area.views, numbers)
                keys = [key(number) for number in numbers]
                running[self._connector.submit_batch_set(keys, area.views[: len(keys)])] = area
            for task, good, error, _ in self._drain():
                if not good:
                    raise RuntimeError(f"a store failed: {error}")
                areas.append(running.pop(task))
        return {"fill_s": time.perf_counter() - begun}

    def _present(self, objects: int) -> list[int]:
        return self._random.sample(range(objects), BATCH)

    def _absent(self) -> list[int]:
        return [ABSENT + self._random.randrange(ABSENT) for _ in range(BATCH)]

    def _new(self) -> list[int]:
        numbers = list(range(self._extra, self._extra + BATCH))
        self._extra += BATCH
        self._write(self._area.views, numbers)
        return numbers

    def _delete(self, keys: list[str]) -> None:
        if sum(self._answer(self._connector.submit_batch_delete(keys)) or []) != BATCH:
            raise RuntimeError("objects that were just stored are not there to be deleted")

    def measure(self, objects: int, samples: int) -> dict[str, float]:
        """Microseconds per key of batches of `BATCH`, the median of `samples`, and bytes of memory."""

        def keys(numbers: Callable[[], list[int]]) -> Callable[[], list[str]]:
            return lambda: [key(number) for number in numbers()]

        present = keys(partial(self._present, objects))
        return {
            "hit_us": sample(samples, present, self._hits, keep, BATCH),
            "miss_us": sample(samples, keys(self._absent), self._hits, keep, 0),
            "store_us": sample(samples, keys(self._new), self._store, self._delete, BATCH),
            "load_us": sample(samples, present, self._load, keep, BATCH),
            **self.memory(),
        }

    def measure_wrapped(self, objects: int, samples: int) -> dict[str, float]:
        """As `measure`, lookups through LMCache's wrapper of native connectors. It is the connector's only reader then."""
        if self._wrapper is None:
            self._wrapper = Wrapper(self._connector)
        keys, hits, unlock = self._wrapper.keys, self._wrapper.hits, self._wrapper.unlock
        present = partial(self._present, objects)
        return {
            "wrapped_hit_us": sample(samples, lambda: keys(present()), hits, unlock, BATCH),
            "wrapped_miss_us": sample(samples, lambda: keys(self._absent()), hits, unlock, 0),
        }

    def memory(self) -> dict[str, float]:
        """Resident bytes of this process."""
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return {"resident_bytes": pages * resource.getpagesize()}

    def check(self, objects: int, batches: int) -> dict[str, float]:
        """How many objects there are; loads some of them and compares every byte.

        Raises:
            RuntimeError: one of them is missing or has other bytes.
        """
        there = self._connector.stats()["store"]["objects"]
        for _ in range(batches):
            numbers = self._random.sample(range(objects), BATCH)
            self._area.fill(b"\x5a")
            found = self._load([key(number) for number in numbers])
            if found != BATCH:
                raise RuntimeError(f"{BATCH - found} of {BATCH} objects are gone")
            for view, number in zip(self._area.views, numbers, strict=True):
                if view != self._contents.of(number):
                    raise RuntimeError(f"object {number} has other bytes than were stored")
        return {"objects": there, "checked": batches * BATCH}

    def close(self) -> dict[str, float]:
        self._connector.close()
        return {}


def serve(orders: Connection, store: str, store_gb: float) -> None:
    """Opens the store, tells how long that took, then does what it is told until it is killed or told to close."""
    os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"
    name: str = "open"
    worker: GrowthWorker | None = None
    arguments: dict[str, Any] = {}
    while True:
        try:
            if worker is None:
                worker = GrowthWorker(store, store_gb)
                result: dict[str, float] = worker.opened
            else:
                result = getattr(worker, name)(**arguments)
        except Exception as error:  # noqa: BLE001 - the other process decides
            orders.send(({}, f"{name}: {type(error).__name__}: {error}"))
            return
        orders.send((result, None))
        if name == "close":
            return
        name, arguments = orders.recv()
