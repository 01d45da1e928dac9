"""Throughput through a gateway's ring against the embedded store, with the CPU time that each process takes for it."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from demo.gateway import GatewayProcess
from xkv_lmcache import XkvL2Connector

OBJECTS, OBJECT_BYTES, BATCH, IN_FLIGHT = 256, 4 << 20, 8, 4
"""One GiB, in batches of 32 MiB, four of them in flight."""

STORE_GB = 1.5
ROUNDS = 2
"""Of loads; the first round of stores is the only one: a present object is not written again."""


@dataclass(frozen=True)
class Figures:
    """Of one direction: GB per second, and CPU seconds per GB of the connector's process and the gateway's."""

    gb_per_s: float
    own_cpu_s_per_gb: float
    gateway_cpu_s_per_gb: float | None


def key(number: int) -> str:
    return f"model@01000100@0@{number:064x}"


class Mover:
    """Moves all objects one way, with `IN_FLIGHT` batches at once in buffers that are used again and again."""

    def __init__(self, connector: XkvL2Connector) -> None:
        self._connector = connector
        sets = range(IN_FLIGHT)
        self._buffers = [[bytearray(os.urandom(OBJECT_BYTES)) for _ in range(BATCH)] for _ in sets]
        self._heads = [[bytes(buffer[:4096]) for buffer in buffers] for buffers in self._buffers]

    def store(self) -> None:
        """Stores every object: its number, then what its buffer holds."""
        self._move(self._connector.submit_batch_set, self._fill, lambda *_: None)

    def load(self) -> None:
        """Loads every object, and looks at the first page of each."""
        self._move(self._connector.submit_batch_get, lambda *_: None, self._check)

    def _fill(self, place: int, index: int, number: int) -> None:
        self._buffers[place][index][:8] = number.to_bytes(8, "little")

    def _check(self, place: int, index: int, number: int) -> None:
        wanted = number.to_bytes(8, "little") + self._heads[place][index][8:]
        if self._buffers[place][index][:4096] != wanted:
            raise RuntimeError(f"object {number} came back with other bytes")

    def _move(
        self,
        submit: Callable[[list[str], list[memoryview]], int],
        before: Callable[[int, int, int], None],
        after: Callable[[int, int, int], None],
    ) -> None:
        todo = list(range(0, OBJECTS, BATCH))
        free = list(range(IN_FLIGHT))
        running: dict[int, tuple[int, int]] = {}
        while todo or running:
            while todo and free:
                first = todo.pop(0)
                # An object has its place, so that a load knows what it must bring.
                place = first // BATCH % IN_FLIGHT
                if place not in free:
                    todo.insert(0, first)
                    break
                free.remove(place)
                for index in range(BATCH):
                    before(place, index, first + index)
                views = [memoryview(buffer) for buffer in self._buffers[place]]
                running[submit([key(first + index) for index in range(BATCH)], views)] = place, first
            select.select([self._connector.event_fd()], [], [], 60)
            for future, ok, error, results in self._connector.drain_completions():
                place, first = running.pop(future)
                if not ok or (results is not None and not all(results)):
                    raise RuntimeError(f"batch {first // BATCH} failed: {error or results}")
                for index in range(BATCH):
                    after(place, index, first + index)
                free.append(place)


def measure(folder: Path, through_gateway: bool) -> dict[str, Figures]:
    """Figures of `Store` and `Load` with a new store in `folder`."""
    with ExitStack() as stack:
        params: dict[str, Any] = {"store": str(folder / "store"), "store_gb": STORE_GB}
        processes = [psutil.Process()]
        if through_gateway:
            gateway = GatewayProcess(folder / "store", store_gb=STORE_GB, fragment_bytes="auto")
            stack.enter_context(gateway)
            processes.append(psutil.Process(gateway.pid))
            params = {**gateway.params, "batch_slots": 1024}
        connector = XkvL2Connector(**params, namespace="bench", stats_interval_s=3600.0)
        stack.callback(connector.close)
        mover = Mover(connector)

        def timed(move: Callable[[], None], rounds: int) -> Figures:
            def cpu() -> list[float]:
                return [sum(process.cpu_times()[:2]) for process in processes]

            before, begun = cpu(), time.monotonic()
            for _ in range(rounds):
                move()
            took = time.monotonic() - begun
            gb = rounds * OBJECTS * OBJECT_BYTES / 1e9
            own, *others = [(now - then) / gb for now, then in zip(cpu(), before, strict=True)]
            return Figures(gb / took, own, others[0] if others else None)

        return {"Store": timed(mover.store, 1), "Load": timed(mover.load, ROUNDS)}


def comparison(disk: Path) -> Table:
    """Embedded and gateway on the drive of `disk`, and on tmpfs where there is one."""
    table = Table(
        title=f"xkv, {OBJECTS} objects of {OBJECT_BYTES >> 20} MiB, batches of {BATCH}, verify=full"
    )
    for title in (
        "medium",
        "backend",
        "operation",
        "GB/s",
        "CPU-s/GB, server's process",
        "CPU-s/GB, gateway",
    ):
        table.add_column(title, justify="left" if title in ("medium", "backend", "operation") else "right")
    for medium, place in (("disk", disk), ("tmpfs", Path("/dev/shm"))):
        for through_gateway in (False, True):
            name = "gateway" if through_gateway else "embedded"
            print(f"{name} on {medium} ...", flush=True)
            with tempfile.TemporaryDirectory(dir=place, prefix="xkv-bench-") as folder:
                for operation, each in measure(Path(folder), through_gateway).items():
                    other = each.gateway_cpu_s_per_gb
                    gateway = "-" if other is None else f"{other:.2f}"
                    row = (f"{each.gb_per_s:.2f}", f"{each.own_cpu_s_per_gb:.2f}", gateway)
                    table.add_row(medium, name, operation, *row)
    return table
