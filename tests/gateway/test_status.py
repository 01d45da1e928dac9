"""`xkv gateway status`: what is shown is what the gateway has."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

from demo.gateway import GatewayProcess, free_port
from tests.gateway.command import environment, xkv
from tests.plugin.client import Client, contents


def test_json_and_text_show_store_drives_usage_sessions_and_rates(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    shared = GatewayProcess(drives, store_gb=0.25, share_drives="on")
    with shared as gateway, Client(**gateway.params) as client:
        at = ["--port", str(gateway.port)]
        assert client.set({f"key-{i}": contents(i, 40_960) for i in range(10)})
        done = xkv("status", *at, "--json")
        assert done.returncode == 0, done.stderr
        state = json.loads(done.stdout)
        assert (state["objects"], state["slots_used"], state["fragment_bytes"]) == (10, 100, 4096)
        assert [drive["name"] for drive in state["drives"]] == [f"{drive}/xkv-store.dat" for drive in drives]
        assert sum(drive["slots_used"] for drive in state["drives"]) == 100
        assert sum(drive["slots_total"] for drive in state["drives"]) == state["slots_total"]
        assert all(drive["bytes"] == 1 << 27 for drive in state["drives"])
        (session,) = state["sessions"]
        assert session["slots"] == gateway.params["batch_slots"] and session["bytes_written"] == 409_600
        assert state["bytes_written"] == 409_600 and state["rates"]["bytes_written_per_s"] == 0

        text = xkv("status", env=environment(XKV_GATEWAY_PORT=str(gateway.port)))
        assert text.returncode == 0, text.stderr
        for part in (
            state["store"],
            "10 objects",
            f"{drives[0]}/xkv-store.dat",
            "1 open",
            session["address"],
            "straight",
        ):
            assert part in text.stdout, text.stdout


def test_rates_are_those_of_the_moment(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway, Client(**gateway.params) as client:
        stop = threading.Event()

        def load() -> None:
            key = 0
            while not stop.is_set():
                assert client.set({f"key-{key}": contents(key, 100_000)})
                assert client.get({f"key-{key}": 100_000}) != {}
                key += 1

        loading = threading.Thread(target=load)
        loading.start()
        try:
            rates = json.loads(xkv("status", "--port", str(gateway.port), "--json").stdout)["rates"]
        finally:
            stop.set()
            loading.join()
        assert rates["committed_per_s"] > 0 and rates["io_per_s"] > 0
        assert rates["bytes_read_per_s"] > 0 and rates["bytes_written_per_s"] > 0


def test_bytes_of_sessions_that_ended_still_count(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        for i in range(2):
            with Client(**gateway.params) as client:
                assert client.set({f"{i}": contents(i, 8192)})
        while gateway.status()["sessions"]:
            pass
        state = gateway.status()
        assert (state["bytes_written"], state["sessions_opened"]) == (16_384, 2)


def test_nobody_there_and_somebody_else_there() -> None:
    done = xkv("status", "--port", str(port := free_port()))
    assert done.returncode == 1 and f"127.0.0.1:{port} cannot be reached" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        stranger = threading.Thread(target=answer)
        stranger.start()
        done = xkv("status", "--port", str(listener.getsockname()[1]))
        stranger.join()
    assert done.returncode == 1 and "gateway 127.0.0.1:" in done.stderr
    assert xkv("status", "--port", "http").returncode == 2
