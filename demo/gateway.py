"""A gateway in a process of its own, as it runs in production: `xkv gateway serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil

from demo.stack import StackError

START_S = 60
"""A loaded machine may take so long to start an interpreter."""

LISTENING = b"serving a store of"
"""In the line that it logs once it listens."""

DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")
"""A `prefix` for a gateway that ends when the thread that started it does."""


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class GatewayProcess:
    """Starts, signals and ends a gateway.

    Args:
        store: its store, one path or several.
        host: the address to listen on.
        log: the file for what it writes; beside the store if not given.
        prefix: a command that runs it in its turn.
        settings: further settings, by field; `shm_dir` is a folder of its own if not given.
    """

    def __init__(
        self,
        store: Path | list[Path],
        *,
        host: str = "127.0.0.1",
        log: Path | None = None,
        prefix: tuple[str, ...] = (),
        **settings: object,
    ) -> None:
        paths = store if isinstance(store, list) else [store]
        self.host, self.port = host, free_port()
        self.prefix = prefix
        # A socket's path is short.
        self._own_folder = None if "shm_dir" in settings else tempfile.mkdtemp(prefix="xkv-")
        defaults: dict[str, object] = {
            "store_gb": 0.5,
            "fragment_bytes": 4096,
            "heartbeat_s": 0.1,
            "shm_dir": self._own_folder,
        }
        place = {"store": ",".join(map(str, paths)), "host": host, "port": self.port}
        self.settings: dict[str, Any] = {**place, **defaults, **settings}
        self.log = log or paths[0].parent / f"gateway-{self.port}.log"
        self._mark = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """What a connector needs to reach it."""
        return {
            "host": self.host,
            "port": self.port,
            "shm_dir": str(self.settings["shm_dir"]),
            "batch_slots": 256,
            "reopen_after_s": 0.3,
        }

    @property
    def pid(self) -> int:
        """Of the gateway, whatever runs it."""
        assert self.process is not None
        below = psutil.Process(self.process.pid).children(recursive=True)
        return below[-1].pid if below else self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
        if self._own_folder:
            shutil.rmtree(self._own_folder)

    def start(self, *, wait: bool = True) -> None:
        """Starts it; with `wait`, returns when it listens."""
        assert self.process is None
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        command = [*self.prefix, sys.executable, "-m", "xkv_lmcache.cli", "gateway", "serve", *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.await_listening()

    def await_listening(self) -> None:
        """Returns when it says that it listens. StackError with its log when it ends or the time is over."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while LISTENING not in (text := self.log.read_bytes()[self._mark :]):
            if (code := self.process.poll()) is not None or time.monotonic() > deadline:
                said = text.decode(errors="replace")
                raise StackError(f"the gateway does not listen (exit code {code}); {self.log}:\n{said}")
            time.sleep(0.01)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it by a signal; its exit code."""
        process, self.process = self.process, None
        assert process is not None
        for child in psutil.Process(process.pid).children(recursive=True):
            child.send_signal(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
        return process.wait(30)

    def restart(self, number: int = signal.SIGTERM) -> None:
        """Ends it by a signal, and starts another."""
        self.end(number)
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped, as by a debugger or a dying machine."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        from xkv_lmcache import _native

        token_file = self.settings.get("token_file")
        token = Path(str(token_file)).read_text().strip() if token_file else None
        state: dict[str, Any] = json.loads(_native.gateway_status(self.host, self.port, token, 10))
        return state
