"""Whoever comes and goes leaves nothing in the gateway: slots, leases, descriptors, threads, memory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from demo.gateway import GatewayProcess
from tests.plugin.client import Client, contents
from tests.plugin.relay import Relay

from .worlds import ClientProcess, await_that

NUMBERS = list(range(20))
ROUNDS = 50
MIB = 1 << 20


def taken(gateway: GatewayProcess) -> tuple[int, int, int]:
    """Descriptors, threads and rings of the gateway's process."""
    process = psutil.Process(gateway.pid)
    rings = Path(f"/proc/{process.pid}/maps").read_text().count("memfd:xkv")
    return process.num_fds(), process.num_threads(), rings


def test_fifty_cut_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        relay = Relay(gateway.host, gateway.port)
        try:
            params = {**gateway.params, "port": relay.port, "reopen_after_s": 0.05}
            with ClientProcess(params) as client:
                assert client.ask("set", numbers=NUMBERS) is True
                used = gateway.status()["slots_used"]
                floor, memory = (0, 0, 0), 0
                for round_ in range(ROUNDS):
                    client.churn(NUMBERS, 0.1, store=True)
                    opened = gateway.status()["sessions_opened"]
                    await_that("a cut in the middle", lambda: relay.cut() == 1)
                    churned = client.answer()
                    assert churned["wrong"] == 0
                    await_that("another session", lambda o=opened: gateway.status()["sessions_opened"] > o)
                    client.await_state("open")
                    if round_ == 4:
                        await_that("one session", lambda: len(gateway.status()["sessions"]) == 1)
                        floor, memory = taken(gateway), psutil.Process(gateway.pid).memory_info().rss
                assert client.ask("set", numbers=NUMBERS) is True
                assert client.ask("get", numbers=NUMBERS) == {"right": 20, "wrong": 0, "missing": 0}
                await_that("one session", lambda: len(gateway.status()["sessions"]) == 1)
                await_that(
                    "all slots but those of the objects", lambda: gateway.status()["slots_used"] == used
                )
                (left,) = gateway.status()["sessions"]
                assert (left["leases"], left["transactions"], left["slots_in_use"]) == (0, 0, 0)
                await_that(
                    "the floor", lambda: all(a <= b for a, b in zip(taken(gateway), floor, strict=True))
                )
                assert taken(gateway)[2] == 1
                assert psutil.Process(gateway.pid).memory_info().rss < memory + 16 * MIB
            await_that("no session", lambda: gateway.status()["sessions"] == [])
            await_that("no ring", lambda: taken(gateway)[2] == 0)
            assert os.listdir(gateway.settings["shm_dir"]) == []
        finally:
            relay.close()


@contextmanager
def memory_limit(limit: int) -> Iterator[tuple[str, ...]]:
    """A control group of so many bytes; yields the command that runs another in it."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").exists()
    folder = (root / "memory" if first else root) / f"xkv-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        yield ("sh", "-c", f'echo $$ > "{folder / "cgroup.procs"}" && exec "$@"', "sh")
    finally:
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
def test_too_little_memory_is_one_clear_line_and_nobody_is_killed(tmp_path: Path) -> None:
    with (
        memory_limit(400 * MIB) as inside,
        GatewayProcess(tmp_path / "store", prefix=inside, fragment_bytes=131072) as gateway,
    ):
        large = {**gateway.params, "batch_slots": 4096, "wait_timeout_s": 2.0}
        with Client(**large) as client:
            assert client.exists(["a"]) == [False]
            reason = client.connector.stats()["session"]["reason"]
            said = re.search(
                r"a ring of (\d+) bytes does not fit: (\d+) bytes of memory are available", reason
            )
            assert said, reason
            assert int(said[1]) >= 4096 * 131072 and int(said[2]) < 400 * MIB
            assert "lower batch_slots" in reason
            with Client(**gateway.params) as other:
                assert other.set({"a": contents(1, 5 * MIB)})
                assert other.get({"a": 5 * MIB}) == {"a": contents(1, 5 * MIB)}
        assert gateway.process is not None and gateway.process.poll() is None
        assert gateway.end(signal.SIGTERM) == 0
