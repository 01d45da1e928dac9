"""Runs the launcher as a process and watches it from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).parent / "standin"
COMMAND = Path(__file__).parent / "main_command.py"
RUN_MARK = "XKV_TEST_RUN"

T = TypeVar("T")


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def environment(**values: str) -> dict[str, str]:
    """An environment without settings of the outside, in which the launcher can be imported."""
    telemetry = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LMC", "XKV")) and name not in telemetry
    }
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]))
    return base | {"PYTHONPATH": path, "LMC_LOG_FORMAT": "json"} | values


def run(*arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    return subprocess.run(
        [sys.executable, "-m", "xkv_lmcache_autostart", *arguments],
        env=environment(**values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Plan:
    """How to run a launcher in front of `command`, in which HTTP_PORT stands for the server's front end.

    LMCache's server is the stand-in for it unless `real` is set.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        real: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.http_port = free_ports(2)
        self.mark = uuid.uuid4().hex
        values = {
            RUN_MARK: self.mark,
            "LMC_ENABLE": "1",
            "LMC_PORT": str(self.port),
            "LMC_HTTP_PORT": str(self.http_port),
            "LMC_L1_GB": "0.1",
            "LMC_STOP_S": "5",
            "LMC_WAIT_S": "60",
            "LMC_XKV_STORE": str(folder / "store"),
            "LMC_XKV_STORE_GB": "0.25",
            "LMC_XKV_SLOTS": "64",
            "LMC_XKV_NAMESPACE": "test",
        }
        self.environ = environment(**(values | dict(settings or {})))
        if not real:
            self.environ["PYTHONPATH"] = f"{STANDIN}{os.pathsep}{self.environ['PYTHONPATH']}"
        words = [word.replace("HTTP_PORT", str(self.http_port)) for word in command]
        self.argv = [sys.executable, "-m", "xkv_lmcache_autostart", "--", *words]


class Launcher:
    """A running launcher: `pid1` runs it as PID 1 of its own process namespace, `prefix` as the child of a program."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        pid1: bool = False,
        prefix: Sequence[str] = (),
        real: bool = False,
        read_output: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if pid1:
            prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
        plan = Plan(folder, command, real=real, settings=settings)
        self.port, self.http_port, self.mark = plan.port, plan.http_port, plan.mark
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [*prefix, *plan.argv],
            env=plan.environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._wrapped = bool(prefix)
        self._pid: int | None = None
        self._reader: threading.Thread | None = None
        if read_output:
            self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print("\n".join(self.lines))
        for process in [*self.left(), self.process]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        if self._reader is not None:
            self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read(self) -> None:
        """Collect the output from now on."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The launcher's process as seen from here, also where it runs under something else."""
        if not self._wrapped:
            return self.process.pid
        if self._pid is None:
            self._pid = await_value(
                lambda: next(
                    (
                        child.pid
                        for child in psutil.Process(self.process.pid).children()
                        if _is_launcher(child)
                    ),
                    None,
                )
            )
        return self._pid

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def expect(self, text: str, *, timeout: float = 60.0, after: int = 0) -> str:
        """Wait for a line with `text`, from line `after` on; returns it."""

        def found() -> str | None:
            return next((line for line in self.lines[after:] if text in line), None)

        with self._news:
            if not self._news.wait_for(lambda: found() is not None or self._ended, timeout):
                raise AssertionError(f"no line with {text!r} within {timeout:g} s")
            line = found()
        assert line is not None, f"the output ended without a line with {text!r}"
        return line

    def wait(self, timeout: float = 30.0) -> int:
        """The launcher's exit code, as a shell would see it."""
        code = self.process.wait(timeout)
        return code if code >= 0 else 128 - code

    def server(self) -> psutil.Process:
        """The server's process."""
        return self._child("http_server")

    def command(self) -> psutil.Process:
        """The main command's process."""
        return self._child(COMMAND.name)

    def left(self) -> list[psutil.Process]:
        """The processes of this run that still live, apart from the launcher and its wrapper."""
        return [
            process
            for process in marked(self.mark)
            if process.pid not in (self.process.pid, self._pid or self.process.pid)
        ]

    def expect_nothing_left(self, timeout: float = 10.0) -> None:
        """Wait until no process of the run lives and both ports are free."""
        await_value(lambda: not marked(self.mark), timeout)
        for port in (self.port, self.http_port):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                probe.listen()

    def _child(self, word: str) -> psutil.Process:
        return await_value(
            lambda: next(
                (
                    child
                    for child in psutil.Process(self.pid).children()
                    if any(word in part for part in _words(child))
                ),
                None,
            )
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def await_value(look: Callable[[], T | None], timeout: float = 10.0) -> T:
    """Look until there is something true to see. Processes give no event to outsiders, hence the looking."""
    deadline = time.monotonic() + timeout
    while not (value := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing to see within {timeout:g} s")
        time.sleep(0.02)
    return value


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as environ:
                if f"{RUN_MARK}={mark}".encode() not in environ.read():
                    continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def _is_launcher(process: psutil.Process) -> bool:
    """Whether it is, and not the program before it on the way there."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return words[1:3] == ["-m", "xkv_lmcache_autostart"]


def _words(process: psutil.Process) -> list[str]:
    """What the process runs; the watchdog's words are the launcher's own."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return []
    return [] if "xkv_lmcache_autostart" in words else words
