"""Processes in worlds of their own: clients that are told what to do, network namespaces, folders that are not shared."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from demo.stack import ROOT

PATIENCE_S = 60
"""A loaded machine may take so long to start an interpreter."""

_numbers = itertools.count()


class ClientProcess:
    """A connector in a process of its own; see `client_process`. `prefix` runs it under something else."""

    def __init__(self, params: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
        module = "tests.gateway_faults.client_process"
        command = [*prefix, sys.executable, "-m", module, json.dumps(params)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        """Of the client, whatever runs it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return below[-1].pid if below else self.process.pid

    def __enter__(self) -> Self:
        assert self.answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.kill()
        self.process.communicate()

    def tell(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = PATIENCE_S) -> Any:
        """The next line it says. Lines are asked for one at a time, so nothing is left behind the first."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert readable, f"the client said nothing for {timeout} s"
        line = self.process.stdout.readline()
        assert line, "the client ended"
        return json.loads(line)

    def ask(self, do: str, **what: Any) -> Any:
        self.tell(do, **what)
        return self.answer()

    def churn(self, numbers: list[int], seconds: float, **what: Any) -> None:
        """Returns as soon as it is at it; `answer` has the outcome."""
        assert self.ask("churn", numbers=numbers, seconds=seconds, **what) == "churning"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def await_state(self, state: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.ask("session"))
            return found["state"] == state

        await_that(f"a session that is {state}", reached, timeout)
        return found


def await_that(what: str, holds: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def network() -> Iterator[tuple[str, ...]]:
    """A network namespace with nothing but loopback; yields the command that runs another in it."""
    name = f"xkv-{os.getpid()}-{next(_numbers)}"
    run("ip", "netns", "add", name)
    try:
        inside = ("ip", "netns", "exec", name)
        run(*inside, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        run("ip", "netns", "del", name)


def join(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, str]:
    """Lays a cable between two `network`s; returns the address of each on it."""
    number = next(_numbers)
    ends = (f"xkv{os.getpid() % 10000}a{number}", f"xkv{os.getpid() % 10000}b{number}")
    run("ip", "link", "add", "name", ends[0], "type", "veth", "peer", "name", ends[1])
    addresses = ("10.77.0.1", "10.77.0.2")
    for inside, end, address in zip((first, second), ends, addresses, strict=True):
        run("ip", "link", "set", end, "netns", inside[-1])
        run(*inside, "ip", "addr", "add", f"{address}/24", "dev", end)
        run(*inside, "ip", "link", "set", end, "up")
    return addresses


@contextmanager
def dropped(inside: tuple[str, ...], port: int) -> Iterator[None]:
    """While this lasts every packet from and to `port` of the network is lost, without a word to anybody."""
    rules = [("--dport", str(port)), ("--sport", str(port))]
    for rule in rules:
        run(*inside, "iptables", "-A", "INPUT", "-p", "tcp", *rule, "-j", "DROP")
    yield
    for rule in rules:
        run(*inside, "iptables", "-D", "INPUT", "-p", "tcp", *rule, "-j", "DROP")


def with_own_folder(folder: Path) -> tuple[str, ...]:
    """A command that runs another with a `folder` of its own in place of everybody's."""
    return ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs own "{folder}" && exec "$@"', "sh")


def with_file(source: Path, target: str) -> tuple[str, ...]:
    """A command that runs another with `source` as its file `target`."""
    return ("unshare", "--mount", "sh", "-c", f'mount --bind "{source}" "{target}" && exec "$@"', "sh")
