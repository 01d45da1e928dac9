"""Bytes that change on the drive are never loaded: a miss, and the next store repairs it."""

import os
import random
import time
from pathlib import Path

import numpy
import pytest

from tests.backends import Backend

from .client import Client, contents

FRAGMENT = 4096
SIZE = 3 * FRAGMENT + 1000
OBJECTS = 50
ROUNDS = 20
"""With every object flipped once a round: a thousand flips."""


def blocks(store: Path) -> dict[bytes, int]:
    """The start of every 4 KiB block of the store's file, and where it is."""
    starts = numpy.fromfile(store, dtype="V4096").view("u1").reshape(-1, 4096)[:, :16]
    return {start.tobytes(): number * 4096 for number, start in enumerate(starts) if start.any()}


def await_removed(client: Client, keys: list[str]) -> None:
    """A gateway removes a damaged object only once it has read it again and seen the damage itself."""
    deadline = time.monotonic() + 30
    while any(client.exists(keys)):
        assert time.monotonic() < deadline


def test_a_thousand_flipped_bytes_are_a_thousand_misses(backend: Backend, tmp_path: Path) -> None:
    rng = random.Random(7)
    with Client(**backend.params(tmp_path, store_gb=0.03, fragment_bytes=FRAGMENT)) as client:
        (file,) = tmp_path.iterdir()
        for number in range(ROUNDS):
            # New contents each time: removed objects leave theirs on the drive.
            objects = {str(i): contents(1000 * number + i, SIZE) for i in range(OBJECTS)}
            sizes = dict.fromkeys(objects, SIZE)
            assert client.set(objects)
            where = blocks(file)
            fd = os.open(file, os.O_RDWR)
            for data in objects.values():
                at = rng.randrange(SIZE)
                start = at // FRAGMENT * FRAGMENT
                offset = where[data[start : start + 16]] + at - start
                byte = os.pread(fd, 1, offset)[0]
                assert byte == data[at]
                os.pwrite(fd, bytes([byte ^ rng.randrange(1, 256)]), offset)
            os.fsync(fd)
            os.close(fd)
            assert client.get(sizes) == dict.fromkeys(objects)
            if backend.kind == "gateway":
                await_removed(client, list(objects))
            assert client.exists(list(objects)) == [False] * OBJECTS, "removed"
            assert client.set(objects), "the next store repairs it"
            assert client.get(sizes) == objects
            assert client.delete(list(objects)) == [True] * OBJECTS
        stats = client.connector.stats()
        assert stats["load_miss_not_verified"] == stats["discarded"] == ROUNDS * OBJECTS


@pytest.mark.parametrize(
    ("verify", "sampled", "other"), [("full", None, None), ("sample", None, "x"), ("off", "x", "x")]
)
def test_what_each_way_to_verify_sees(
    verify: str, sampled: object, other: object, backend: Backend, tmp_path: Path
) -> None:
    params = backend.params(tmp_path, store_gb=0.03, fragment_bytes=FRAGMENT, verify=verify)
    with Client(**params) as client:
        (file,) = tmp_path.iterdir()
        for seed, (within, loads) in enumerate([(5, sampled), (2000, other)]):
            data = contents(seed, SIZE)
            assert client.set({"a": data})
            offset = blocks(file)[data[FRAGMENT : FRAGMENT + 16]] + within
            with file.open("r+b") as drive:
                drive.seek(offset)
                drive.write(bytes([data[FRAGMENT + within] ^ 1]))
            assert (client.get({"a": SIZE})["a"] is not None) == (loads is not None)
            client.delete(["a"])


def test_three_times_the_capacity(backend: Backend, tmp_path: Path) -> None:
    size = 100_000

    def usage(client: Client) -> dict[str, int]:
        return backend.usage(tmp_path, client.connector.stats())

    with Client(**backend.params(tmp_path, store_gb=0.03, fragment_bytes=FRAGMENT)) as client:
        total = usage(client)["slots_total"]
        count = 3 * total * FRAGMENT // size
        for i in range(count):
            assert client.set({str(i): contents(i, size)})
            assert usage(client)["slots_used"] <= total
        keys = [str(i) for i in range(count)]
        present = client.exists(keys)
        kept = present.count(True)
        assert present == [False] * (count - kept) + [True] * kept, "the least recently used went"
        assert kept > count // 6
    backend.release(tmp_path)
    with Client(**backend.params(tmp_path)) as client:
        assert client.exists(keys) == present
        last = str(count - 1)
        assert client.get({last: size}) == {last: contents(count - 1, size)}
        assert client.set({"new": contents(1, size)})
        assert usage(client)["slots_used"] <= total
