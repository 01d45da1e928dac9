"""A gateway in a process of its own, as it runs in production: `xkv gateway serve`."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil

START_S = 60
"""A loaded machine may take so long to start an interpreter."""


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class GatewayProcess:
    """Starts, signals and ends a gateway on `store`; `settings` are its flags, `prefix` runs it under something else."""

    def __init__(
        self, store: Path, *, host: str = "127.0.0.1", prefix: tuple[str, ...] = (), **settings: object
    ) -> None:
        self.host, self.port = host, free_port(host)
        self._prefix = prefix
        # A socket's path is short.
        shm = Path(tempfile.mkdtemp(prefix="xkv-"))
        defaults: dict[str, object] = {
            "store_gb": 0.5,
            "fragment_bytes": 4096,
            "heartbeat_s": 0.1,
            "shm_dir": shm,
        }
        self.settings = {"store": store, "host": host, "port": self.port, **defaults, **settings}
        self.log = store.parent / f"gateway-{self.port}.log"
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

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
        shutil.rmtree(str(self.settings["shm_dir"]))

    def start(self, *, wait: bool = True) -> None:
        assert self.process is None
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        command = [*self._prefix, sys.executable, "-m", "xkv_lmcache.cli", "gateway", "serve", *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        if wait:
            self.await_listening()

    def await_listening(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process is not None
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
                return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
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
        self.end(number)
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped, as by a debugger or a dying machine."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


class Relay:
    """A TCP relay between a client and a gateway: it can cut connections, or keep them and pass nothing on."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._woken = os.pipe()
        self._lock = threading.Lock()
        self.silent = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> int:
        """Resets every connection; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for pair in pairs:
                for end in pair:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.close()
            return len(pairs)

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(10)
        self.cut()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._lock:
                ends = [] if self.silent else [end for pair in self._pairs for end in pair]
            readable, _, _ = select.select([self._wake, self._listener, *ends], [], [], 0.02)
            if self._wake in readable:
                return
            with self._lock:
                if self._listener in readable:
                    client, _ = self._listener.accept()
                    try:
                        self._pairs.append((client, socket.create_connection(self._target, timeout=1)))
                    except OSError:
                        client.close()
                for pair in list(self._pairs):
                    for source, target in (pair, pair[::-1]):
                        if source in readable and not self._pass_on(source, target):
                            self._pairs.remove(pair)
                            source.close()
                            target.close()
                            break

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> bool:
        try:
            data = source.recv(65536)
            target.sendall(data)
        except OSError:
            return False
        return bool(data)
