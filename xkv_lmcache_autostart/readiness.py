"""When a server is ready: the child itself owns both ports, is alive, and answers /healthcheck with 200."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable
from typing import Final

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from xkv_lmcache_autostart import sockets
from xkv_lmcache_autostart.settings import Settings

POLL_S: Final = 0.2
_ANSWER_S: Final = 2.0
_UNPROVEN_S: Final = 2.0
"""How long a child must live after its first 200 where /proc cannot show what it owns."""


class NotReady(Exception):
    """The server will not become ready; the text says why."""


class ChildProbe:
    """Looks at a server that was started as process `pid`, step by step."""

    def __init__(self, pid: int, settings: Settings) -> None:
        self.waiting_for = "the server to open its ports"
        self.proven = True
        """Whether /proc showed that the ports are the child's own."""
        self._pid = pid
        self._http = (settings.http_connect_host, settings.http_port)
        self._ports = (
            ("LMC_PORT", settings.host, settings.port),
            ("LMC_HTTP_PORT", settings.http_host, settings.http_port),
        )
        self._first_answer: float | None = None

    def look(self) -> bool:
        """Whether it is ready now. Raises `NotReady` when it will not be: the port is a stranger's."""
        for name, host, port in self._ports:
            if not self._owns(name, host, port):
                self.waiting_for = f"the server to open {name}={port}"
                return False
        self.waiting_for = f"http://{self._http[0]}:{self._http[1]}/healthcheck to answer 200"
        if _health(*self._http) != 200:
            self._first_answer = None
            return False
        if self.proven:
            return True
        self._first_answer = self._first_answer or time.monotonic()
        return time.monotonic() - self._first_answer >= _UNPROVEN_S

    def _owns(self, name: str, host: str, port: int) -> bool:
        try:
            own = sockets.owned_inodes(self._pid)
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has just ended, which is for the caller to see
        except OSError:
            self.proven = False
            return True
        try:
            found = sockets.listeners(host, port)
        except OSError:
            self.proven = False
            return True
        strangers = [listener for listener in found if listener.inode not in own]
        if strangers and len(strangers) == len(found):
            raise NotReady(
                f"{name}={port} belongs to {sockets.holder(strangers[0])}, not to the server that was "
                "started; end it or choose another port"
            )
        return bool(found)


def wait_for(look: Callable[[], bool], wait_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Look until `look` is true; False after `wait_s` seconds. What `look` or `sleep` raise ends the wait."""
    retrying = Retrying(
        sleep=sleep,
        stop=stop_after_delay(wait_s),
        wait=wait_fixed(POLL_S),
        retry=retry_if_result(lambda ready: not ready),
        retry_error_callback=lambda _state: False,
    )
    return bool(retrying(look))


def remote_server_ready(settings: Settings) -> bool:
    """Whether a server that somebody else runs takes connections and answers /healthcheck with 200."""
    return _health(http_host(settings), settings.http_port) == 200 and _connects(
        settings.connect_host, settings.port
    )


def http_host(settings: Settings) -> str:
    """Where the front end of a server that somebody else runs is: `LMC_HTTP_HOST` if set, else `LMC_HOST`."""
    return settings.http_connect_host if "http_host" in settings.model_fields_set else settings.connect_host


def _health(host: str, port: int) -> int | None:
    """The status of GET /healthcheck, never through a proxy; None without an answer."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
