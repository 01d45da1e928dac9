"""One connector kept busy with overlapping batches over a working set that does not fit its store.

Every version of an object has other bytes, and says which it is: a load must bring the whole of one version that was
stored after the last removal that was answered before the load was submitted.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import select
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil

from demo.gateway import GatewayProcess
from tests.backends import Backend
from tests.plugin.client import behind_a_page
from xkv_lmcache import XkvL2Connector

MIB = 1 << 20
STORE_GB = 0.25
KEYS = 2000
SIZES = (1000, 4096, 70_000, 131_072, 300_001, 800_000)
"""Bytes of the objects; all together more than twice what the store takes."""
IN_FLIGHT = 16
GUARD = 64
HEAD = 16
"""Bytes of an object that say which it is: key and version."""
LONGEST_S = 60.0
"""Far above every deadline in force: an operation that takes longer hangs."""
SAMPLE_S = 2.0
GROWTH = 48 * MIB
"""What the resident memory of a process may grow by after its first quarter."""

BASE = numpy.random.default_rng(20).integers(0, 256, 32 * MIB, dtype=numpy.uint8)
"""Contents are pieces of this, each from another place."""


def key(number: int) -> str:
    return f"model@01000100@0@{number:064x}"


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def write(target: numpy.ndarray[Any, Any], number: int, version: int) -> None:
    target[:] = piece(number, version)
    target[:HEAD] = numpy.frombuffer(
        number.to_bytes(8, "little") + version.to_bytes(8, "little"), numpy.uint8
    )


def piece(number: int, version: int) -> numpy.ndarray[Any, Any]:
    size = size_of(number)
    start = (number * 1_000_003 + version * 7_919_777) % (len(BASE) - size)
    return BASE[start : start + size]


def version_of(data: numpy.ndarray[Any, Any], number: int) -> int | None:
    """The version that `data` is, whole; None for bytes that were never stored under this key."""
    head = data[:HEAD].tobytes()
    found, version = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
    if found != number or not numpy.array_equal(data[HEAD:], piece(number, version)[HEAD:]):
        return None
    return version


class Buffers:
    """Guarded buffers, used again and again, so that memory stays what it is. Every fourth goes through slots; the others
    begin with a page, as LMCache's do, and their whole blocks go straight."""

    def __init__(self) -> None:
        self._free: dict[int, list[numpy.ndarray[Any, Any]]] = {}
        self._numbers = itertools.count()

    def take(self, size: int) -> numpy.ndarray[Any, Any]:
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        arena = numpy.full(size + 2 * GUARD + mmap.PAGESIZE, 0xA5, dtype=numpy.uint8)
        shift = GUARD if next(self._numbers) % 4 == 3 else 0
        start = behind_a_page(arena.ctypes.data, GUARD, shift)
        return arena[start : start + size]

    def give(self, buffer: numpy.ndarray[Any, Any]) -> None:
        arena, size = buffer.base, len(buffer)
        assert arena is not None
        start = buffer.ctypes.data - arena.ctypes.data
        before, behind = arena[start - GUARD : start], arena[start + size : start + size + GUARD]
        assert (before == 0xA5).all() and (behind == 0xA5).all(), "written beside a buffer"
        self._free[size].append(buffer)


@dataclass
class Batch:
    kind: str
    numbers: list[int]
    buffers: list[numpy.ndarray[Any, Any]]
    begun: float
    known: list[int]
    """Loads: the oldest version each may be. Removals: the newest that was submitted before."""


@dataclass
class Footprint:
    """What a process holds, over time: resident bytes, descriptors, threads."""

    pid: int
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def sample(self) -> None:
        process = psutil.Process(self.pid)
        with process.oneshot():
            self.samples.append(
                (time.monotonic(), process.memory_info().rss, process.num_fds(), process.num_threads())
            )

    def verdict(self) -> list[str]:
        """What grew after the first quarter."""
        first = self.samples[0][0]
        settled = first + (self.samples[-1][0] - first) / 4
        early = [each for each in self.samples if each[0] <= settled]
        late = [each for each in self.samples if each[0] > settled]
        faults = []
        limits = (("memory", 1, GROWTH), ("descriptors", 2, 2), ("threads", 3, 2))
        for name, column, allowed in limits:
            before, after = (max(each[column] for each in part) for part in (early, late))
            if after > before + allowed:
                faults.append(f"process {self.pid}: {name} grew from {before} to {after}")
        return faults

    def __str__(self) -> str:
        _, rss, fds, threads = self.samples[-1]
        return f"{rss // MIB} MiB, {fds} descriptors, {threads} threads"


class Soak:
    """A connector, what it was asked, and what its answers were."""

    def __init__(self, connector: XkvL2Connector, seed: int) -> None:
        self.connector = connector
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.longest_s = 0.0
        self._random = random.Random(seed)
        self._buffers = Buffers()
        self._running: dict[int, Batch] = {}
        self._newest = [0] * KEYS
        self._oldest = [1] * KEYS
        self._again: deque[list[int]] = deque()
        """Keys whose removal was answered: to be stored anew."""

    def submit(self) -> None:
        choice = self._random.random()
        if choice < 0.6:
            self._load(self._random.sample(range(KEYS), 8))
        elif choice < 0.75 and self._again:
            self._store(self._again.popleft())
        elif choice < 0.88:
            self._store(self._random.sample(range(KEYS), 4))
        elif choice < 0.98:
            self._remove(self._random.sample(range(KEYS), 3))
        else:
            numbers = self._random.sample(range(KEYS), 64)
            future = self.connector.submit_batch_exists([key(number) for number in numbers])
            self._running[future] = Batch("exists", numbers, [], time.monotonic(), [])

    def _load(self, numbers: list[int]) -> None:
        buffers = [self._buffers.take(size_of(number)) for number in numbers]
        known = [self._oldest[number] for number in numbers]
        batch = Batch("get", numbers, buffers, time.monotonic(), known)
        views = [memoryview(buffer) for buffer in buffers]
        self._running[self.connector.submit_batch_get([key(n) for n in numbers], views)] = batch

    def _store(self, numbers: list[int]) -> None:
        buffers = []
        for number in numbers:
            self._newest[number] += 1
            buffer = self._buffers.take(size_of(number))
            write(buffer, number, self._newest[number])
            buffers.append(buffer)
        batch = Batch("set", numbers, buffers, time.monotonic(), [])
        views = [memoryview(buffer) for buffer in buffers]
        self._running[self.connector.submit_batch_set([key(n) for n in numbers], views)] = batch

    def _remove(self, numbers: list[int]) -> None:
        known = [self._newest[number] for number in numbers]
        future = self.connector.submit_batch_delete([key(number) for number in numbers])
        self._running[future] = Batch("delete", numbers, [], time.monotonic(), known)

    def collect(self, patience: float) -> None:
        select.select([self.connector.event_fd()], [], [], patience)
        for future, ok, _, results in self.connector.drain_completions():
            batch = self._running.pop(future)
            took = time.monotonic() - batch.begun
            self.longest_s = max(self.longest_s, took)
            self.counts[f"{batch.kind} batches"] += 1
            match batch.kind:
                case "get":
                    self._check(batch, results or [])
                case "set":
                    self.counts["stores" if ok else "stores refused"] += len(batch.numbers)
                case "delete":
                    self._removed(batch, results or [])
                case _:
                    self.counts["found"] += sum(results or [])
            for buffer in batch.buffers:
                self._buffers.give(buffer)
        now = time.monotonic()
        for batch in self._running.values():
            if now - batch.begun > LONGEST_S:
                raise AssertionError(f"a {batch.kind} is unanswered after {LONGEST_S} s")

    def _check(self, batch: Batch, results: list[bool]) -> None:
        assert len(results) == len(batch.numbers)
        for number, buffer, oldest, hit in zip(
            batch.numbers, batch.buffers, batch.known, results, strict=True
        ):
            if not hit:
                self.counts["misses"] += 1
                continue
            self.counts["loads checked"] += 1
            self.counts["bytes checked"] += len(buffer)
            version = version_of(buffer, number)
            if version is None:
                self.faults.append(f"object {number}: wrong bytes")
            elif not oldest <= version <= self._newest[number]:
                self.faults.append(
                    f"object {number}: version {version}, removed before; {oldest} is the oldest there can be"
                )

    def _removed(self, batch: Batch, results: list[bool]) -> None:
        assert len(results) == len(batch.numbers)
        for number, newest, done in zip(batch.numbers, batch.known, results, strict=True):
            if done:
                self.counts["removals"] += 1
                self._oldest[number] = max(self._oldest[number], newest + 1)
        self._again.append(batch.numbers)

    @property
    def in_flight(self) -> int:
        return len(self._running)


@dataclass
class Outcome:
    """Of one backend: what was counted, what was wrong, what its processes hold at the end."""

    counts: Counter[str]
    faults: list[str]
    longest_s: float
    footprints: dict[str, str]


def soak(
    kind: str, folder: Path, seconds: float, *, mib_per_s: float = 0, kill_every_s: float = 0
) -> Outcome:
    """Keeps one connector to a new store in `folder` busy for `seconds`.

    Args:
        kind: the backend, `embedded` or `gateway`.
        mib_per_s: bytes loaded and stored are held back to so much; 0: as fast as it goes.
        kill_every_s: with a gateway, so often it is killed and started again; 0: never.
    """
    backend = Backend(kind, sharing=True)
    store = folder / f"soak-{kind}"
    connector = XkvL2Connector(
        **backend.params(store, store_gb=STORE_GB, namespace="soak"), stats_interval_s=3600.0
    )
    run = Soak(connector, seed=os.getpid())
    gateway: GatewayProcess | None = backend.gateways.get(store)
    footprints = {"connector": Footprint(os.getpid())}
    if gateway is not None and not kill_every_s:
        footprints["gateway"] = Footprint(gateway.pid)
    begun = time.monotonic()
    sampled, killed = begun, begun
    try:
        while (now := time.monotonic()) < begun + seconds and len(run.faults) < 20:
            moved = run.counts["bytes checked"] * 1.5
            held_back = mib_per_s and moved > mib_per_s * MIB * (now - begun)
            while not held_back and run.in_flight < IN_FLIGHT:
                run.submit()
            run.collect(0.05)
            if now > sampled + SAMPLE_S:
                sampled = now
                for footprint in footprints.values():
                    footprint.sample()
            if gateway is not None and kill_every_s and now > killed + kill_every_s:
                killed = now
                gateway.end(9)
                gateway.start(wait=False)
                run.counts["kills"] += 1
        while run.in_flight:
            run.collect(0.05)
        stats = connector.stats()
        for name in ("store_skipped", "store_deduped", "store_poisoned", "load_miss_not_verified"):
            run.counts[name] = stats[name]
        if stats["load_miss_not_verified"]:
            run.faults.append(f"{stats['load_miss_not_verified']} loads did not match their checksums")
        run.counts["evicted"] = backend.usage(store, stats)["evicted"]
    finally:
        connector.close()
        backend.close()
    faults = run.faults + [fault for footprint in footprints.values() for fault in footprint.verdict()]
    return Outcome(
        run.counts, faults, run.longest_s, {name: str(print_) for name, print_ in footprints.items()}
    )
