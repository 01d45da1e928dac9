"""A gateway in its own process that dies, freezes, restarts or loses its connection: operations are answered in time,
bytes are right, and nothing is left behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from demo.gateway import GatewayProcess
from xkv_lmcache import XkvL2Connector

from .client import Buffer, Client, contents
from .relay import Relay

SIZE = 50_000
WAIT_S = 1.0
"""`wait_timeout_s` of most clients here."""
IDLE_S = float(os.environ.get("XKV_IDLE_SECONDS", "20"))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path / "store") as gateway:
        yield gateway


def connect(gateway: GatewayProcess, **params: Any) -> Client:
    return Client(**{**gateway.params, "wait_timeout_s": WAIT_S, **params})


def session(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = client.connector.stats()["session"]
    return state


def await_that(what: str, holds: Callable[[], bool], timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.005)


def await_open(client: Client) -> None:
    await_that("a session", lambda: session(client)["state"] == "open")


def objects(numbers: range) -> dict[str, bytes]:
    return {str(number): contents(number, SIZE) for number in numbers}


def sizes(numbers: range) -> dict[str, int]:
    return {str(number): SIZE for number in numbers}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_first_operation_fails_for_a_restart_while_idle(gateway: GatewayProcess, number: int) -> None:
    with connect(gateway, wait_timeout_s=20) as client:
        assert client.set(objects(range(3)))
        for round_ in range(4):
            gateway.end(number)
            gateway.start(wait=False)
            if round_ == 0:
                assert client.get(sizes(range(3))) == objects(range(3))
            elif round_ == 1:
                assert client.set({"new": contents(99, SIZE)})
            elif round_ == 2:
                assert client.exists(["0", "none"]) == [True, False]
            else:
                assert client.delete(["new"]) == [True]
        assert session(client)["reopened"] == 4 and session(client)["unanswered"] == 0
        assert client.get({**sizes(range(3)), "new": SIZE}) == {**objects(range(3)), "new": None}


def test_a_gateway_that_starts_after_the_connector(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "store")
    started = time.monotonic()
    with connect(gateway) as client:
        assert time.monotonic() - started < WAIT_S + 1
        assert client.get(sizes(range(2))) == dict.fromkeys(sizes(range(2)))
        assert not client.set(objects(range(2))) and client.exists(["0"]) == [False]
        with gateway:
            await_open(client)
            assert client.set(objects(range(2)))
            assert client.get(sizes(range(2))) == objects(range(2))


def test_kill_9_in_the_middle_of_everything(gateway: GatewayProcess) -> None:
    rng = random.Random(3)
    acknowledged: dict[str, bytes] = {}
    deadlines = {"load_deadline_s": 5.0, "store_deadline_s": 5.0}
    with connect(gateway, **deadlines) as client:
        for round_ in range(12):
            names = [f"{round_} {i}" for i in range(30)]
            data = {name: contents(hash((round_, i)) & 0xFFFF, SIZE) for i, name in enumerate(names)}
            sets = [(name, Buffer(data[name])) for name in names]
            known = list(acknowledged)
            loads = [(name, Buffer.blank(SIZE)) for name in rng.sample(known, min(20, len(known)))]
            doomed = rng.sample(known, min(3, len(known)))
            loads = [(name, buffer) for name, buffer in loads if name not in doomed]
            connector = client.connector
            set_ids = [(name, connector.submit_batch_set([name], [buffer.view])) for name, buffer in sets]
            get_ids = [
                (name, buffer, connector.submit_batch_get([name], [buffer.view])) for name, buffer in loads
            ]
            delete_ids = [(name, connector.submit_batch_delete([name])) for name in doomed]
            look = connector.submit_batch_exists(known)
            time.sleep(rng.random() * 0.05)
            gateway.end(signal.SIGKILL)
            started = time.monotonic()
            for name, future in set_ids:
                if client.answer(future, 10)[1]:
                    acknowledged[name] = data[name]
            for name, buffer, future in get_ids:
                if client.bools(future) == [True]:
                    assert buffer.content() == acknowledged[name], "right bytes or a miss"
            for name, future in delete_ids:
                client.bools(future)
                acknowledged.pop(name, None)
            client.bools(look)
            assert time.monotonic() - started < WAIT_S + 2, "answered at the session's end"
            gateway.start()
            await_open(client)
            found = client.get({name: SIZE for name in acknowledged})
            assert found == acknowledged, "what was acknowledged is there after a kill -9"
        assert len(acknowledged) > 12


def test_a_freeze_shorter_than_the_deadlines_costs_nothing(gateway: GatewayProcess) -> None:
    with connect(gateway, wait_timeout_s=5) as client:
        assert client.set(objects(range(10)))
        buffers = {name: Buffer.blank(SIZE) for name in sizes(range(10))}
        source = Buffer(contents(50, SIZE))
        with gateway.frozen():
            get = client.connector.submit_batch_get(
                list(buffers), [buffer.view for buffer in buffers.values()]
            )
            put = client.connector.submit_batch_set(["new"], [source.view])
            look = client.connector.submit_batch_exists(["0"])
            time.sleep(1)
        assert client.bools(get) == [True] * 10
        assert {name: buffer.content() for name, buffer in buffers.items()} == objects(range(10))
        assert client.answer(put)[1]
        assert client.bools(look) == [True]
        assert session(client)["lost"] == 0


def test_a_freeze_longer_than_the_deadlines_costs_one_wait_and_late_data_lands_nowhere(
    gateway: GatewayProcess,
) -> None:
    with connect(gateway) as client:
        assert client.set(objects(range(10)))
        buffers = [Buffer.blank(SIZE) for _ in range(10)]
        with gateway.frozen():
            started = time.monotonic()
            get = client.connector.submit_batch_get(
                [str(number) for number in range(10)], [buffer.view for buffer in buffers]
            )
            put = client.connector.submit_batch_set(["new"], [Buffer(contents(50, SIZE)).view])
            assert client.bools(get) == [False] * 10
            assert not client.answer(put)[1]
            assert time.monotonic() - started < WAIT_S + 1
            started = time.monotonic()
            for number in range(20):
                assert client.get({str(number): SIZE}) == {str(number): None}
                assert client.exists(["0"]) == [False]
            assert time.monotonic() - started < WAIT_S, "the others need not wait again"
            left = [buffer.content() for buffer in buffers]
        await_open(client)
        assert client.get(sizes(range(10))) == objects(range(10))
        assert [buffer.content() for buffer in buffers] == left
        assert client.set({"new": contents(50, SIZE)})
        assert client.get({"new": SIZE}) == {"new": contents(50, SIZE)}


def test_a_frozen_idle_gateway_is_noticed_and_found_again(gateway: GatewayProcess) -> None:
    with connect(gateway) as client:
        assert client.set(objects(range(3)))
        with gateway.frozen():
            await_that("the loss", lambda: session(client)["state"] == "lost")
            started = time.monotonic()
            assert client.get(sizes(range(3))) == dict.fromkeys(sizes(range(3)))
            assert time.monotonic() - started < WAIT_S + 1
            started = time.monotonic()
            assert client.get(sizes(range(3))) == dict.fromkeys(sizes(range(3)))
            assert time.monotonic() - started < WAIT_S / 2
        await_open(client)
        assert client.get(sizes(range(3))) == objects(range(3))


def test_a_cut_connection_while_both_live(gateway: GatewayProcess) -> None:
    relay = Relay(gateway.host, gateway.port)
    try:
        with connect(gateway, port=relay.port, wait_timeout_s=5) as client:
            assert client.set(objects(range(3)))
            for round_ in range(5):
                assert relay.cut() == 1
                await_that("the loss", lambda lost=round_ + 1: session(client)["lost"] == lost)  # type: ignore[misc]
                assert client.get(sizes(range(3))) == objects(range(3)), "idle: the first load waits"
                await_open(client)
            assert session(client)["reopened"] == 5
    finally:
        relay.close()


def test_a_half_open_connection(gateway: GatewayProcess) -> None:
    relay = Relay(gateway.host, gateway.port)
    try:
        with connect(gateway, port=relay.port) as client:
            assert client.set(objects(range(3)))
            relay.silent = True
            await_that("the loss", lambda: session(client)["state"] == "lost")
            assert "silent" in session(client)["reason"] or "answer" in session(client)["reason"]
            started = time.monotonic()
            client.get(sizes(range(3)))
            assert client.get(sizes(range(3))) == dict.fromkeys(sizes(range(3)))
            assert time.monotonic() - started < WAIT_S + 1
            relay.silent = False
            await_open(client)
            assert client.get(sizes(range(3))) == objects(range(3))
    finally:
        relay.close()


def test_wrong_settings_name_their_cure(tmp_path: Path) -> None:
    (secret := tmp_path / "token").write_text("right\n")
    (wrong := tmp_path / "wrong").write_text("guess\n")
    (empty := tmp_path / "empty").write_text("\n")
    with GatewayProcess(tmp_path / "store", token_file=secret) as gateway:
        with connect(gateway, token_file=str(secret)) as client:
            assert client.set(objects(range(1)))
        for params, error, text in [
            ({}, ValueError, "token"),
            ({"token_file": str(wrong)}, ValueError, "token"),
            ({"token_file": str(empty)}, ValueError, "is empty"),
            ({"token_file": str(tmp_path / "none")}, FileNotFoundError, "token_file"),
            ({"token_file": str(secret), "fragment_bytes": 8192}, ValueError, "fragment_bytes=4096"),
        ]:
            with pytest.raises(error, match=text) as caught:
                XkvL2Connector(**gateway.params, **params)
            assert "guess" not in str(caught.value) and "right" not in str(caught.value)


def test_a_shared_folder_that_is_not_shared(gateway: GatewayProcess) -> None:
    # pytest's own folders have paths too long for a socket.
    with TemporaryDirectory(prefix="xkv") as other, connect(gateway, shm_dir=other) as client:
        assert not client.set(objects(range(1)))
        assert client.get(sizes(range(1))) == {"0": None}
        assert "another host" in session(client)["reason"] and other in session(client)["reason"]


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_names_and_addresses(tmp_path: Path, host: str) -> None:
    listen = "127.0.0.1" if host == "localhost" else host
    with GatewayProcess(tmp_path / "store", host=listen) as gateway, connect(gateway, host=host) as client:
        assert client.set(objects(range(1)))
        assert client.get(sizes(range(1))) == objects(range(1))


WRITER = """
import os, sys
from tests.plugin.client import Buffer, contents
from demo.gateway import GatewayProcess
from xkv_lmcache import XkvL2Connector
import json
connector = XkvL2Connector(**json.loads(sys.argv[1]))
buffers = [Buffer(contents(number, 50_000)) for number in range(200)]
connector.submit_batch_set([str(number) for number in range(200)], [buffer.view for buffer in buffers])
print("storing", flush=True)
connector.submit_batch_get(["kept"] * 50, [Buffer.blank(50_000).view for _ in range(50)])
sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_its_keys_to_the_other(gateway: GatewayProcess) -> None:
    with connect(gateway) as client:
        assert client.set({"kept": contents(1, SIZE)})
        for _ in range(5):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, json.dumps(gateway.params)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"storing\n"
            writer.kill()
            writer.wait()
            for pipe in (writer.stdout, writer.stdin):
                if pipe is not None:
                    pipe.close()
            assert client.set(objects(range(200))), client.connector.stats()
            assert client.get(sizes(range(200))) == objects(range(200))
            assert client.delete([str(number) for number in range(200)]) == [True] * 200


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and session memories of this process."""
    me = psutil.Process()
    mapped = Path("/proc/self/maps").read_text().count("memfd:xkv-session")
    return me.num_fds(), me.num_threads(), mapped


def test_fifty_restarts_leave_nothing_behind(gateway: GatewayProcess) -> None:
    with connect(gateway, wait_timeout_s=20) as client:
        assert client.set(objects(range(3)))
        for round_ in range(50):
            gateway.restart(signal.SIGKILL if round_ % 2 else signal.SIGTERM)
            assert client.get(sizes(range(3))) == objects(range(3))
            if round_ == 4:
                floor = resources()
                memory = psutil.Process().memory_info().rss
        await_that("back to the floor", lambda: resources() <= floor)
        assert resources()[2] == 1
        assert psutil.Process().memory_info().rss < memory + 16 * 2**20
        assert session(client)["reopened"] == 50
        assert os.listdir(gateway.settings["shm_dir"]) == []  # type: ignore[arg-type]


def test_both_sides_restart_at_the_same_moment(gateway: GatewayProcess) -> None:
    for round_ in range(5):
        client = connect(gateway, wait_timeout_s=20)
        assert client.set({f"{round_}": contents(round_, SIZE)})
        starting = threading.Thread(target=gateway.restart, args=(signal.SIGKILL,))
        starting.start()
        client.connector.close()
        with connect(gateway, wait_timeout_s=20) as client:
            starting.join()
            await_open(client)
            assert client.get({f"{i}": SIZE for i in range(round_ + 1)}) == {
                f"{i}": contents(i, SIZE) for i in range(round_ + 1)
            }


def test_a_store_written_by_one_opens_in_the_other(tmp_path: Path) -> None:
    with Client(store=str(tmp_path / "store"), store_gb=0.5, fragment_bytes=4096) as client:
        assert client.set(objects(range(5)))
    with GatewayProcess(tmp_path / "store") as gateway:
        with connect(gateway) as client:
            assert client.get(sizes(range(5))) == objects(range(5))
            assert client.set(objects(range(5, 10)))
            with pytest.raises(OSError, match="store"):
                XkvL2Connector(store=str(tmp_path / "store"))
        gateway.end()
    with Client(store=str(tmp_path / "store")) as client:
        assert client.get(sizes(range(10))) == objects(range(10))


def test_an_idle_connector_and_gateway_cost_next_to_nothing(gateway: GatewayProcess) -> None:
    # With the settings in force when nobody says otherwise.
    del gateway.settings["heartbeat_s"]
    gateway.restart()
    with connect(gateway, wait_timeout_s=5) as client:
        await_open(client)
        both = [psutil.Process(), psutil.Process(gateway.pid)]
        before = [sum(process.cpu_times()[:2]) for process in both]
        time.sleep(IDLE_S)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(both, before, strict=True)]
        print(f"CPU of the connector's process and the gateway over {IDLE_S:g} s: {used}")
        assert max(used) < 0.01 * IDLE_S, used


def test_a_port_that_is_no_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started = time.monotonic()
        with Client(host="127.0.0.1", port=port, wait_timeout_s=WAIT_S) as client:
            assert time.monotonic() - started < WAIT_S + 1
            assert client.exists(["a"]) == [False]
