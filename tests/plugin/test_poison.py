"""LMCache 0.5.4 publishes the keys of a failed load before it deletes them, and so hands their unfilled L1 buffers to
every adapter as stores of good keys (`prefetch_controller.py`, "Clean up failed keys"). Those stores must be refused
before submit returns: while one is pending its read lock keeps the unfilled object readable, as an L1 hit.

Reproduced here with LMCache's own storage manager. Later versions do not publish them; then nothing is refused.
"""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from lmcache.v1.distributed import api

from tests.backends import Backend
from tests.e2e.storage_process import contents, key, open_manager, prefetch, view
from xkv_lmcache import XkvL2Connector

from .test_integrity import FRAGMENT, blocks

pytestmark = [pytest.mark.lmcache, pytest.mark.matrix]

SIZE = 2 * FRAGMENT + 100
KEYS = 10
ROUNDS = 10
"""Every key fails to load in every round: a hundred failed loads."""

PUBLISHES_FAILED_KEYS = version("lmcache") == "0.5.4"


class Watched(XkvL2Connector):
    """Counts the stores that were submitted, and those that were refused as poisoned before submit returned."""

    submitted = refused_in_submit = 0
    made: ClassVar[list[XkvL2Connector]] = []

    def __new__(cls, **adapter_params: Any) -> Self:
        made = super().__new__(cls, **adapter_params)
        cls.made.append(made)
        return made

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        before = self.stats()["store_poisoned"]
        future = super().submit_batch_set(keys, memoryviews)
        Watched.refused_in_submit += self.stats()["store_poisoned"] - before
        Watched.submitted += len(keys)
        return future


def await_sets(keys: int) -> None:
    """Returns once LMCache has submitted stores of so many keys in all."""
    deadline = time.monotonic() + 60
    while Watched.submitted < keys:
        assert time.monotonic() < deadline, f"{Watched.submitted} of {keys} keys were submitted in 60 s"
        time.sleep(0.002)
    assert Watched.submitted == keys


def await_drained(manager: Any) -> None:
    """Returns once LMCache has drained the answer of every store it submitted."""
    deadline = time.monotonic() + 60
    while True:
        status = manager.report_status()
        stores = status["store_controller"]
        stores = (
            stores if "in_flight_task_count" in stores else next(iter(status["store_controllers"].values()))
        )
        if not stores["in_flight_task_count"]:
            return
        assert time.monotonic() < deadline, "stores are unanswered after 60 s"
        time.sleep(0.002)


def empty_l1(manager: Any) -> None:
    """LMCache skips objects that are locked, and it unlocks the stored ones some time after their answer."""
    deadline = time.monotonic() + 60
    while manager.clear() or manager._l1_manager.report_status()["total_object_count"]:
        assert time.monotonic() < deadline, "objects are locked after 60 s"
        time.sleep(0.002)


def delay_deletes(manager: Any, monkeypatch: pytest.MonkeyPatch, sets: list[int]) -> None:
    """Has LMCache delete failed keys only after its other thread has taken them for written: a race that it loses by
    itself in every tenth round or so."""
    l1 = manager._l1_manager
    delete = l1.delete

    def late(keys: list[api.ObjectKey], *args: Any) -> Any:
        await_sets(sets[-1] + len(keys))
        return delete(keys, *args)

    monkeypatch.setattr(l1, "delete", late)


def compute(manager: Any, numbers: range, layout: api.MemoryLayoutDesc) -> list[api.ObjectKey]:
    """What vLLM does with a chunk that is not cached: writes it into L1, from where it goes to L2."""
    keys = [key(number) for number in numbers]
    mode = () if hasattr(api, "PrefetchTaskSpec") else ("new",)
    reserved = manager.reserve_write(keys, layout, *mode)
    assert len(reserved) == len(keys)
    for number, each in zip(numbers, keys, strict=True):
        view(reserved[each])[:] = contents(number, SIZE)
    manager.finish_write(keys)
    return keys


def damage(file: Path, numbers: range) -> None:
    where = blocks(file)
    with file.open("r+b") as drive:
        for number in numbers:
            data = contents(number, SIZE)
            drive.seek(where[data[:16]] + 100)
            drive.write(bytes([data[100] ^ 1]))
        drive.flush()
        os.fsync(drive.fileno())


def test_unfilled_buffers_of_failed_loads_are_never_stored_nor_hit(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = {
        "type": "native_plugin",
        "module_path": __name__,
        "class_name": "Watched",
        "adapter_params": backend.params(tmp_path, store_gb=0.03, fragment_bytes=FRAGMENT),
    }
    layout = api.MemoryLayoutDesc(shapes=[torch.Size([SIZE])], dtypes=[torch.uint8])
    manager = open_manager(json.dumps(adapter))
    try:
        connector = Watched.made[-1]
        monkeypatch.setattr(Watched, "submitted", 0)
        monkeypatch.setattr(Watched, "refused_in_submit", 0)
        (file,) = tmp_path.iterdir()
        sets = [0]
        """Keys that LMCache has submitted in sets, so far."""

        def compute_and_store(numbers: range) -> list[api.ObjectKey]:
            keys = compute(manager, numbers, layout)
            sets.append(sets[-1] + KEYS)
            await_sets(sets[-1])
            await_drained(manager)
            empty_l1(manager)
            return keys

        if PUBLISHES_FAILED_KEYS:
            delay_deletes(manager, monkeypatch, sets)
        for number in range(ROUNDS):
            numbers = range(number * KEYS, (number + 1) * KEYS)
            keys = compute_and_store(numbers)
            damage(file, numbers)
            assert prefetch(manager, keys, layout) == (0, 0), "every load fails"
            failed = (number + 1) * KEYS
            poisoned = failed * PUBLISHES_FAILED_KEYS
            sets.append(sets[-1] + KEYS * PUBLISHES_FAILED_KEYS)
            await_drained(manager)
            stats = connector.stats()
            assert stats["load_miss_not_verified"] == failed
            assert stats["store_poisoned"] == Watched.refused_in_submit == poisoned
            for _ in range(5):
                assert prefetch(manager, keys, layout) == (0, 0), "neither in L2 nor, unfilled, in L1"
            # Recomputed under the same keys, often at the same addresses.
            compute_and_store(numbers)
            assert prefetch(manager, keys, layout) == (KEYS, 0)
            with manager.read_prefetched_results(keys) as objects:
                assert [bytes(view(each)) for each in objects] == [contents(i, SIZE) for i in numbers]
            manager.finish_read_prefetched(keys)
            assert connector.stats()["store_stored"] == 2 * failed
    finally:
        manager.close()
