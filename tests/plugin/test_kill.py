"""kill -9 while objects are being stored: what was acknowledged is there, byte for byte; what else is visible is right
too; no slot is lost; and the store opens at once."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .client import Client
from .objects import content, key

FRAGMENT = 4096
ROUNDS = int(os.environ.get("XKV_KILL_ROUNDS", "50"))
"""A short campaign; `make crash` runs a long one."""


@pytest.mark.parametrize("engine", ["uring", "pool"])
def test_what_was_acknowledged_survives_kill_9(engine: str, tmp_path: Path) -> None:
    rng = random.Random(engine)
    params = {"store": str(tmp_path), "store_gb": 0.4, "fragment_bytes": FRAGMENT, "io_engine": engine}
    first = acknowledged = unacknowledged = 0
    for number in range(ROUNDS // 2):
        attempted, stored = killed_writer(params, first, rng.uniform(0, 0.15))
        assert stored, "the kill came before anything was stored"
        opening = time.monotonic()
        with Client(**params) as client:
            assert time.monotonic() - opening < 10
            numbers = sorted(attempted)
            present = client.exists([key(each) for each in numbers])
            visible = [each for each, there in zip(numbers, present, strict=True) if there]
            assert stored <= set(visible), f"round {number}: {sorted(stored - set(visible))} are lost"
            sizes = {key(each): len(content(each)) for each in visible}
            loaded = client.get(sizes)
            wrong = [each for each in visible if loaded[key(each)] != content(each)]
            assert not wrong, f"round {number}: wrong bytes in {wrong}"
            used = sum(-(-size // FRAGMENT) for size in sizes.values())
            assert client.connector.stats()["store"]["slots_used"] == used
            assert all(client.delete(list(sizes)))
            assert client.connector.stats()["store"]["slots_used"] == 0
        first = max(numbers) + 1
        acknowledged += len(stored)
        unacknowledged += len(attempted - stored)
    assert unacknowledged > 0, "no kill came in the middle of a store"
    print(
        f"{ROUNDS // 2} kills, {acknowledged} acknowledged objects, all there; {unacknowledged} were in flight"
    )


def killed_writer(params: dict[str, object], first: int, delay: float) -> tuple[set[int], set[int]]:
    """Runs a writer and kills it `delay` seconds after its first acknowledgement. Objects attempted, acknowledged."""
    command = [sys.executable, "-m", "tests.plugin.writer_process", json.dumps(params), str(first)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        text = ""
        while "\ns " not in text:
            line = writer.stdout.readline()
            assert line, "the writer ended before anything was stored"
            text += line
        time.sleep(delay)
        writer.kill()
        text += writer.stdout.read()
    # What follows the last line end was cut by the kill.
    words = [line.split() for line in text.split("\n")[:-1]]
    attempted = {int(number) for verb, number in words if verb == "a"}
    return attempted, {int(number) for verb, number in words if verb == "s"}
