"""One process with one adapter: takes orders as JSON lines, answers with what it measured.

All workers share two memory areas, one with what is stored, one with what is loaded, as only one works at a time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

MAX_TASKS = 8
"""Batches in flight: LMCache's default for loads (`--l2-prefetch-max-in-flight`)."""

PATIENCE_S = 120.0
LOOKUP_KEYS = 64


def machine_cpu_s() -> float:
    """CPU seconds of the whole machine so far."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, soft = map(int, stat.readline().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def own_cpu_s(helper: psutil.Process | None) -> float:
    """CPU seconds so far of this process, and of the one that has the store."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = usage.ru_utime + usage.ru_stime
    if helper is None:
        return own
    times = helper.cpu_times()
    return own + float(times.user + times.system)


def drop_caches(folder: Path) -> None:
    """Has the page cache of every file below `folder` written out and dropped."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush(folder: Path) -> None:
    """What it takes until everything below `folder` survives a power cut."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def sectors_read(folder: Path) -> int | None:
    """Bytes read so far from the block device that `folder` is on; None where there is none."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(place.read_text().split()[2]) * 512 if place.exists() else None


class Bench:
    """An adapter made by LMCache's factory, and objects of one size in the shared memory."""

    def __init__(
        self,
        spec: dict[str, Any],
        source: Any,
        target: Any,
        folder: Path,
        size: int,
        helper: int | None = None,
    ) -> None:
        from lmcache.cli.commands.bench.l2_adapter_bench import data
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        self.size, self.folder, self._data = size, folder, data
        self._source, self._target = source, target
        self._helper = None if helper is None else psutil.Process(helper)
        arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        config = parse_args_to_l2_adapters_config(arguments).adapters[0]
        memory = data.create_l1_memory_desc(target, align_bytes=4096)
        self.adapter: Any = create_l2_adapter(config, l1_memory_desc=memory)

    def keys(self, round_: int, count: int) -> list[Any]:
        keys: list[Any] = self._data.make_object_keys(count, key_offset=(round_ + 1) * 100_000)
        return keys

    def objects(self, area: Any, count: int, turn: int) -> list[Any]:
        """`count` buffers, each `turn` objects further on in `area`, so that rounds have different contents."""
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        objects = []
        room = area.numel() // self.size
        for index in range(count):
            start = (index + turn) % room * self.size
            raw = area[start : start + self.size]
            metadata = MemoryObjMetadata(
                shape=raw.shape,
                dtype=raw.dtype,
                address=raw.data_ptr(),
                phy_size=self.size,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            )
            objects.append(TensorMemoryObj(raw_data=raw, metadata=metadata, parent_allocator=None))
        return objects

    def run(self, count: int, batch: int, submit: Callable[[int, int], int], event: int, take: Any) -> int:
        """Submits `count` keys in batches, `MAX_TASKS` at once. The number of keys that went well."""
        ranges = [(start, min(count, start + batch)) for start in range(0, count, batch)]
        running: dict[int, int] = {}
        done = 0
        while ranges or running:
            while ranges and len(running) < MAX_TASKS:
                first, last = ranges.pop(0)
                running[submit(first, last)] = last - first
            answers = take(list(running))
            if not answers:
                if not self._data.wait_eventfd(event, timeout=PATIENCE_S):
                    raise RuntimeError(f"no answer within {PATIENCE_S:g} s")
                continue
            for task, good in answers.items():
                keys = running.pop(task)
                done += keys if good is True else int(good)
        return done

    def store_tasks(self, keys: Sequence[Any], objects: Sequence[Any], batch: int) -> int:
        def take(_: list[int]) -> dict[int, int | bool]:
            done = self.adapter.pop_completed_store_tasks()
            return {task: result.is_successful() for task, result in done.items()}

        def submit(first: int, last: int) -> int:
            return int(self.adapter.submit_store_task(keys[first:last], objects[first:last]))

        return self.run(len(keys), batch, submit, self.adapter.get_store_event_fd(), take)

    def _bitmaps(self, query: Callable[[int], Any]) -> Callable[[list[int]], dict[int, int]]:
        def take(running: list[int]) -> dict[int, int]:
            found = {task: query(task) for task in running}
            return {task: bitmap.popcount() for task, bitmap in found.items() if bitmap is not None}

        return take

    def load_tasks(self, keys: Sequence[Any], objects: Sequence[Any], batch: int) -> int:
        def submit(first: int, last: int) -> int:
            return int(self.adapter.submit_load_task(keys[first:last], objects[first:last]))

        take = self._bitmaps(self.adapter.query_load_result)
        return self.run(len(keys), batch, submit, self.adapter.get_load_event_fd(), take)

    def lookup_tasks(self, keys: Sequence[Any], batch: int) -> int:
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        layout = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}

        def submit(first: int, last: int) -> int:
            return int(self.adapter.submit_lookup_and_lock_task(keys[first:last], layout))

        take = self._bitmaps(self.adapter.query_lookup_and_lock_result)
        event = self.adapter.get_lookup_and_lock_event_fd()
        return self.run(len(keys), batch, submit, event, take)

    def timed(self, count: int, action: Callable[[], int]) -> dict[str, float]:
        """GB per second and CPU seconds per GB of `action` on `count` objects."""
        gb = count * self.size / 1e9
        own, machine, begun = own_cpu_s(self._helper), machine_cpu_s(), time.perf_counter()
        good = action()
        took = time.perf_counter() - begun
        if good != count:
            raise RuntimeError(f"{good} of {count} objects went well")
        return {
            "gb_per_s": gb / took,
            "own_cpu_s_per_gb": (own_cpu_s(self._helper) - own) / gb,
            "machine_cpu_s_per_gb": (machine_cpu_s() - machine) / gb,
            "seconds": took,
        }

    def store(self, round_: int, count: int, batch: int) -> dict[str, Any]:
        keys, objects = self.keys(round_, count), self.objects(self._source, count, 7 * round_)
        begun = time.perf_counter()
        figures = self.timed(count, lambda: self.store_tasks(keys, objects, batch))
        flush(self.folder)
        return {**figures, "durable_gb_per_s": count * self.size / 1e9 / (time.perf_counter() - begun)}

    def load(self, round_: int, count: int, batch: int, cold: bool) -> dict[str, Any]:
        keys, objects = self.keys(round_, count), self.objects(self._target, count, 0)
        wanted = self.objects(self._source, count, 7 * round_)
        for each in objects:
            each.raw_data[::64] = 0x5A
        if cold:
            drop_caches(self.folder)
        before = sectors_read(self.folder)
        figures: dict[str, Any] = self.timed(count, lambda: self.load_tasks(keys, objects, batch))
        after = sectors_read(self.folder)
        if before is not None and after is not None:
            figures["read_from_drive"] = (after - before) / (count * self.size)
        wrong = sum(
            not np.array_equal(loaded.raw_data.numpy(), stored.raw_data.numpy())
            for loaded, stored in zip(objects, wanted, strict=True)
        )
        return {**figures, "verified_bytes": (count - wrong) * self.size, "wrong_objects": wrong}

    def load_while_storing(self, round_: int, count: int, batch: int) -> dict[str, Any]:
        """Loads the objects of `round_`, one at a time and eight at once, alone and then again and again while those of
        the next round are stored."""
        stored: list[int] = []

        def store_all() -> None:
            keys, objects = self.keys(round_ + 1, count), self.objects(self._source, count, 7 * (round_ + 1))
            stored.append(self.store_tasks(keys, objects, batch))

        keys, objects = self.keys(round_, count), self.objects(self._target, count, 0)
        step = min(count, 8)

        def load_while(wanted: Callable[[int], bool]) -> tuple[int, float]:
            loaded, begun = 0, time.perf_counter()
            while wanted(loaded):
                at = loaded % (count - step + 1)
                loaded += self.load_tasks(keys[at : at + step], objects[at : at + step], 1)
            return loaded, time.perf_counter() - begun

        drop_caches(self.folder)
        alone, alone_took = load_while(lambda loaded: loaded < count)
        drop_caches(self.folder)
        writer = threading.Thread(target=store_all)
        writer.start()
        loaded, took = load_while(lambda _: writer.is_alive())
        if stored != [count]:
            raise RuntimeError(f"{stored} of {count} objects were stored")
        self.delete(round_ + 1, count)
        gb = self.size / 1e9
        return {
            "alone_gb_per_s": alone * gb / alone_took,
            "load_gb_per_s": loaded * gb / took,
            "store_gb_per_s": count * gb / took,
        }

    def one_by_one(self, round_: int, count: int, loads: int) -> dict[str, Any]:
        """Latencies of single loads, microseconds."""
        keys, objects = self.keys(round_, count), self.objects(self._target, count, 0)
        times = []
        for index in range(loads):
            at = slice(index % count, index % count + 1)
            begun = time.perf_counter()
            if self.load_tasks(keys[at], objects[at], 1) != 1:
                raise RuntimeError("a single load missed")
            times.append((time.perf_counter() - begun) * 1e6)
        p50, p99 = np.percentile(times, [50, 99])
        return {"p50_us": float(p50), "p99_us": float(p99)}

    def lookup(self, round_: int, count: int, repeats: int) -> dict[str, Any]:
        """Microseconds per key, in batches of `LOOKUP_KEYS`, for keys that are there and keys that are not."""
        present = (self.keys(round_, count) * LOOKUP_KEYS)[:LOOKUP_KEYS]
        absent = self.keys(9000, LOOKUP_KEYS)
        figures = {}
        for name, keys, wanted in (("hit", present, LOOKUP_KEYS), ("miss", absent, 0)):
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                found = self.lookup_tasks(keys, LOOKUP_KEYS)
                times.append((time.perf_counter() - begun) * 1e6 / LOOKUP_KEYS)
                if found != wanted:
                    raise RuntimeError(f"{found} of {LOOKUP_KEYS} keys found, not {wanted}")
                self.adapter.submit_unlock(keys)
            figures[f"{name}_us_per_key"] = float(np.median(times))
        return figures

    def delete(self, round_: int, count: int) -> dict[str, Any]:
        self.adapter.delete(self.keys(round_, count))
        return {}


def main() -> None:
    """Serves orders until standard input ends."""
    import torch

    descriptors = [int(text) for text in sys.argv[1:3]]
    source, target = (
        torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8) for fd in descriptors
    )
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench: Bench | None = None
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        name = order.pop("do")
        try:
            result: dict[str, Any] = {}
            if name == "open":
                folder = Path(order.pop("folder"))
                bench = Bench(source=source, target=target, folder=folder, **order)
            elif bench is None:
                raise RuntimeError("no adapter is open")
            elif name == "close":
                bench.adapter.close()
                bench = None
            else:
                result = getattr(bench, name)(**order)
        except Exception as error:  # noqa: BLE001 - whatever an adapter raises is its result
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
