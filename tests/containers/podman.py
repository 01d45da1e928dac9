"""Containers of the built images, run by podman with runc."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from demo.stack import StackError, T
from scripts.images import version

GATEWAY, CPU = (f"localhost/{name}:{version()}" for name in ("xkv-gateway", "xkv-vllm-cpu"))
USER = 10001
"""Who everything runs as in the images."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def podman(*arguments: str, check: bool = True) -> str:
    """What a podman command prints; on an error with `check`, AssertionError with what it said."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def limits() -> list[str]:
    """Limits that an engine without the right to raise them can give."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [f"--ulimit=nofile={min(files, 20000)}", "--ulimit=nproc=4096"]


def settle(what: str, probe: Callable[[], T | None], timeout_s: float, log: Callable[[], str]) -> T:
    """The first result of `probe` that is not None; StackError with the end of `log` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (found := probe()) is None:
        if time.monotonic() > deadline:
            raise StackError(f"no sign of {what} within {timeout_s:g} s:\n{log()[-4000:]}")
        time.sleep(0.1)
    return found


@dataclass
class Container:
    """One container of ours, gone when the context ends.

    The host's network and IPC, no capabilities, no new rights, a root file system that cannot be written, /tmp and the
    home in memory; whatever is passed in `options` besides.
    """

    image: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"xkv-test-{uuid.uuid4().hex[:8]}")

    def start(self) -> Self:
        podman(
            *("run", "--detach", "--name", self.name, "--runtime=runc", "--network=host", "--ipc=host"),
            *("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"),
            *(f"--tmpfs=/tmp:mode=1777,size={2**30}", f"--tmpfs=/home/xkv:mode=0777,size={2**28}"),
            *("--no-healthcheck", *limits(), *self.options),
            *(f"--env={name}={value}" for name, value in self.env.items()),
            self.image,
            *self.command,
        )
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--time=0", self.name, check=False)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(podman("inspect", self.name, "--format", "{{json .State}}"))
        return found

    def log(self) -> str:
        """Everything that it wrote, without colours."""
        done = subprocess.run(
            ["podman", "logs", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=True,
        )
        return _ANSI.sub("", done.stdout)

    def wait_for(self, what: str, probe: Callable[[], T | None], timeout_s: float) -> T:
        def look() -> T | None:
            if (found := probe()) is not None:
                return found
            state = self.state
            if state["Status"] not in ("running", "created", "initialized"):
                raise StackError(
                    f"{self.name} ended with {state['ExitCode']} before {what}:\n{self.log()[-4000:]}"
                )
            return None

        return settle(what, look, timeout_s, self.log)

    def wait_for_text(self, text: str, timeout_s: float, after: int = 0) -> None:
        self.wait_for(repr(text), lambda: text in self.log()[after:] or None, timeout_s)

    def exec(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command in it."""
        done = subprocess.run(
            ["podman", "exec", self.name, *command], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def stop(self, grace_s: int = 40) -> int:
        """Its exit code after TERM; KILL after the grace."""
        podman("stop", f"--time={grace_s}", self.name)
        return int(self.state["ExitCode"])


def owned_folder(path: Path) -> Path:
    """A new folder that belongs to `USER`."""
    path.mkdir()
    os.chown(path, USER, USER)
    return path


def gateway(store: Path, port: int, *options: str, **settings: str) -> Container:
    """A gateway with its store in a folder of `USER`'s."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return Container(
        GATEWAY,
        ["gateway", "serve", f"--port={port}", "--store=/var/lib/xkv", "--store-gb=1", *flags],
        options=[f"--volume={store}:/var/lib/xkv", *options],
    )
