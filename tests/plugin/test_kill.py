"""kill -9 while objects are being stored, of the process that stores and of the gateway: what was acknowledged is there,
byte for byte; what else is visible is right too; no slot is lost; and the store opens at once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends import Backend

from .client import Client
from .objects import content, key

FRAGMENT = 4096
ROUNDS = int(os.environ.get("XKV_KILL_ROUNDS", "50"))
"""A short campaign; `make crash` runs a long one."""

PATIENCE_S = 30

Kill = Callable[["subprocess.Popen[str]"], None]


def kill_writer(writer: subprocess.Popen[str]) -> None:
    writer.kill()


@pytest.mark.parametrize("engine", ["uring", "pool"])
def test_what_was_acknowledged_survives_kill_9(engine: str, tmp_path: Path) -> None:
    campaign(Backend("embedded"), tmp_path, engine, ROUNDS // 2, kill_writer)


def test_what_was_acknowledged_survives_kill_9_of_a_gateways_client(tmp_path: Path) -> None:
    campaign(Backend("gateway", sharing=True), tmp_path, "auto", ROUNDS // 3, kill_writer)


def test_what_was_acknowledged_survives_kill_9_of_the_gateway(tmp_path: Path) -> None:
    backend = Backend("gateway", sharing=True)

    def kill_gateway(writer: subprocess.Popen[str]) -> None:
        backend.gateways[tmp_path].end(signal.SIGKILL)
        # Its stores are refused, at which it ends by itself.
        writer.wait(PATIENCE_S)

    campaign(backend, tmp_path, "auto", ROUNDS // 3, kill_gateway)


def campaign(backend: Backend, store: Path, engine: str, rounds: int, kill: Kill) -> None:
    """Has a writer store objects, and something killed at a random time, `rounds` times over."""
    rng = random.Random(engine)
    params = backend.params(store, store_gb=0.4, fragment_bytes=FRAGMENT, io_engine=engine)
    first = acknowledged = unacknowledged = 0
    try:
        for number in range(rounds):
            attempted, stored = killed_writer(params, first, rng.uniform(0, 0.15), kill)
            assert stored, "the kill came before anything was stored"
            for gateway in backend.gateways.values():
                if gateway.process is None:
                    gateway.start()
            opening = time.monotonic()
            with Client(**params) as client:
                assert time.monotonic() - opening < 10
                await_other_clients_end(backend, store)
                check_round(client, attempted, stored, number, lambda: used_slots(backend, store, client))
            first = max(attempted) + 1
            acknowledged += len(stored)
            unacknowledged += len(attempted - stored)
    finally:
        backend.close()
    assert unacknowledged > 0, "no kill came in the middle of a store"
    print(f"{rounds} kills, {acknowledged} acknowledged objects, all there; {unacknowledged} were in flight")


def check_round(
    client: Client, attempted: set[int], stored: set[int], number: int, used: Callable[[], int]
) -> None:
    """What was stored is there and right, and so is what else is visible; removing it leaves no slot used."""
    numbers = sorted(attempted)
    present = client.exists([key(each) for each in numbers])
    visible = [each for each, there in zip(numbers, present, strict=True) if there]
    assert stored <= set(visible), f"round {number}: {sorted(stored - set(visible))} are lost"
    sizes = {key(each): len(content(each)) for each in visible}
    loaded = client.get(sizes)
    wrong = [each for each in visible if loaded[key(each)] != content(each)]
    assert not wrong, f"round {number}: wrong bytes in {wrong}"
    await_used(used, sum(-(-size // FRAGMENT) for size in sizes.values()))
    assert all(client.delete(list(sizes)))
    await_used(used, 0)


def used_slots(backend: Backend, store: Path, client: Client) -> int:
    return backend.usage(store, client.connector.stats())["slots_used"]


def await_other_clients_end(backend: Backend, store: Path) -> None:
    """Returns when the gateway, if there is one, has noticed that other clients died, and commits nothing of theirs."""
    deadline = time.monotonic() + PATIENCE_S
    while backend.kind == "gateway":
        state = backend.gateways[store].status()
        if len(state["sessions"]) == 1 and state["committing_ms"] is None:
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.01)


def await_used(used: Callable[[], int], wanted: int) -> None:
    """Returns when so many slots are used: those of what a killed client was storing are free a moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := used()) != wanted:
        assert time.monotonic() < deadline, f"{now} slots are used, not {wanted}"
        time.sleep(0.01)


def killed_writer(
    params: dict[str, object], first: int, delay: float, kill: Kill
) -> tuple[set[int], set[int]]:
    """Runs a writer, and `kill` on it `delay` seconds after its first acknowledgement. Objects attempted, acknowledged."""
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
        try:
            kill(writer)
        finally:
            writer.kill()
        text += writer.stdout.read()
    # What follows the last line end was cut by the kill.
    words = [line.split() for line in text.split("\n")[:-1]]
    attempted = {int(number) for verb, number in words if verb == "a"}
    return attempted, {int(number) for verb, number in words if verb == "s"}
