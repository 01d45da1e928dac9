"""Somebody on the wire who is not what the other side expects: other versions, other programs, nonsense."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.gateway import GatewayProcess
from tests.plugin.client import Client, contents
from xkv_lmcache import XkvL2Connector

VERSION = 1
HELLO = {"type": "hello", "version": VERSION, "client": "stranger", "slots": 16}


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next message; EOFError when the connection ends."""

    def take(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = connection.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    (length,) = struct.unpack("<I", take(4))
    message: dict[str, Any] = json.loads(take(length))
    return message


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway") / "store") as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (
            frame({**HELLO, "version": VERSION + 1}),
            "version",
            f"version {VERSION + 1}, this gateway {VERSION}",
        ),
        (frame({**HELLO, "fragment_bytes": 8192}), "fragment_bytes", "fragment_bytes=4096, not 8192"),
        (frame({"type": "surprise"}), "malformed", "surprise"),
        (frame({"type": "hello"}), "malformed", "version"),
        (struct.pack("<I", 1 << 30) + b"x", "malformed", "1073741824"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "malformed", "bytes"),
    ],
)
def test_a_gateway_refuses_a_stranger_and_says_why(
    gateway: GatewayProcess, sent: bytes, code: str, said: str
) -> None:
    with socket.create_connection((gateway.host, gateway.port), timeout=20) as connection:
        connection.sendall(sent)
        refusal = receive(connection)
        assert (refusal["type"], refusal["code"]) == ("refused", code)
        assert said in refusal["reason"]
        with pytest.raises((EOFError, ConnectionResetError)):
            receive(connection)
    assert gateway.status()["sessions"] == []


def test_unknown_fields_of_a_newer_client_are_ignored(gateway: GatewayProcess) -> None:
    with socket.create_connection((gateway.host, gateway.port), timeout=20) as connection:
        connection.sendall(frame({**HELLO, "colour": [1, {"deep": None}]}))
        assert receive(connection)["type"] == "welcome"


@contextmanager
def stranger(answer: Callable[[dict[str, Any]], bytes]) -> Iterator[int]:
    """A program that answers every hello with `answer` of it; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.sendall(answer(receive(connection)))
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(1)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def test_a_gateway_of_another_version_fails_the_constructor_with_its_reason() -> None:
    reason = "the client speaks protocol version 1, this gateway 7"
    with (
        stranger(lambda hello: frame({"type": "refused", "code": "version", "reason": reason})) as port,
        pytest.raises(ValueError, match=reason),
    ):
        XkvL2Connector(host="127.0.0.1", port=port)


WELCOME = {
    "type": "welcome", "version": VERSION, "store": "ff", "generation": "0x1", "fragment_bytes": 4096, "slots": 16,
    "drives": 1, "socket": "xkv-none.sock", "ticket": "0x1", "heartbeat_ms": 100, "description": "a stranger",
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (frame({**WELCOME, "version": VERSION + 1}), "version 2"),
        (frame({**WELCOME, "fragment_bytes": 4095}), "fragment_bytes=4095"),
        (frame({**WELCOME, "slots": 1 << 30}), "slots"),
        (frame({**WELCOME, "socket": "../../etc/passwd"}), "../../etc/passwd"),
        (frame({**WELCOME, "heartbeat_ms": 3_600_000}), "raise wait_timeout_s"),
        (frame(WELCOME), "another host"),
        (frame({"type": "state", "state": {}}), "gateway"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes"),
        (b"", "gateway"),
    ],
)
def test_a_client_of_a_stranger_goes_without_and_says_why(answer: bytes, said: str, tmp_path: Path) -> None:
    params = {"host": "127.0.0.1", "shm_dir": str(tmp_path), "batch_slots": 64, "wait_timeout_s": 2.0}
    with stranger(lambda hello: answer) as port, Client(**params, port=port) as client:
        begun = time.monotonic()
        assert not client.set({"a": contents(1, 5000)})
        assert client.get({"a": 5000}) == {"a": None}
        assert client.exists(["a"]) == [False]
        assert time.monotonic() - begun < 3
        session = client.connector.stats()["session"]
        assert (session["state"], session["opened"]) == ("lost", 0)
        assert said in session["reason"]
