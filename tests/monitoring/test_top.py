"""`xkv top`: what it shows of real plugins and gateways, for people and for programs."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from demo.gateway import GatewayProcess
from demo.stack import free_ports
from tests.backends import Backend
from tests.monitoring.conftest import await_that
from tests.plugin.client import Client, contents

SIZE = 10_000


def top(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xkv_lmcache.cli", "top", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_a_plugin_did(backend: Backend, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    params = backend.params(tmp_path / "store", store_gb=0.1)
    with Client(**params, stats_path=str(stats), namespace="n") as client:
        objects = {f"key {i}": contents(i, SIZE) for i in range(10)}
        assert client.set(objects) and client.exists(["key 1", "absent"]) == [True, False]
        assert client.get({"key 1": SIZE + 1}) == {"key 1": None}
    shown = top("--once", "--stats", stats)
    for text in (
        "1 of 2 hit (50.0 %)",
        "10 stored, 0 skipped",
        "! 1 loads of another size, removed",
        "NOT READY",
    ):
        assert text in shown.stdout, shown.stdout + shown.stderr
    assert shown.returncode == 1, "closed: no longer ready"
    assert "\x1b" not in shown.stdout, "no colour in a pipe"
    (source,) = json.loads(top("--once", "--json", "--stats", stats).stdout)["sources"]
    assert source["kind"] == "plugin" and source["state"]["store_stored"] == 10


def test_a_gateway_and_its_clients_by_either_port(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        GatewayProcess(tmp_path / "store", metrics_port=port) as gateway,
        Client(**gateway.params) as client,
    ):
        assert client.set({f"key {i}": contents(i, SIZE) for i in range(10)})
        shown = top("--once", "--interval", "0.1", "--port", gateway.port)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        for text in (
            f"gateway 127.0.0.1:{gateway.port}: ready",
            "10 objects",
            "1 open, 1 opened",
            "lmcache server",
        ):
            assert text in shown.stdout
        (source,) = json.loads(top("--once", "--json", "--url", f"http://127.0.0.1:{port}").stdout)["sources"]
        assert source["kind"] == "gateway" and source["state"]["objects"] == 10
        gateway.end(9)
        gone = top("--once", "--interval", "0.1", "--port", gateway.port)
    assert gone.returncode == 1 and f"gateway 127.0.0.1:{gateway.port}" in gone.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--interval", "0"), "must be above 0"),
        (("--url", "localhost:9402"), "write http://HOST:PORT"),
        (("--port", "x"), "is not a port"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = top("--once", *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_a_file_that_is_missing_or_something_else_is_said(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    shown = top("--once", "--stats", tmp_path / "missing", "--stats", other)
    assert shown.returncode == 1
    assert "No such file or directory" in shown.stdout
    assert "not a statistics file; name the one of stats_path" in shown.stdout


@pytest.mark.parametrize("columns", [80, 160])
def test_the_live_view_fits_the_terminal_and_ends_with_ctrl_c(columns: int, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    with Client(store=str(tmp_path / "store"), store_gb=0.1, stats_path=str(stats)):
        pass
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    command = [sys.executable, "-m", "xkv_lmcache.cli", "top", "--stats", str(stats), "--interval", "0.05"]
    env: dict[str, Any] = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True
    ) as process:
        os.close(child)
        written = b""

        def seen() -> bool | None:
            nonlocal written
            if select.select([parent], [], [], 0)[0]:
                written += os.read(parent, 65536)
            return written.count(b"lookups") > 2 or None

        await_that("three views", seen)
        process.send_signal(2)
        assert process.wait(10) == 130
    os.close(parent)
    borders = [line for line in written.decode().splitlines() if "╭" in line and "╮" in line]
    assert borders
    for line in borders:
        drawn = line[line.index("╭") : line.index("╮") + 1]
        plain = "".join(
            part if i == 0 else part.partition("m")[2] for i, part in enumerate(drawn.split("\x1b["))
        )
        assert len(plain) == columns
