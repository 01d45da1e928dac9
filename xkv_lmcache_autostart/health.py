"""`python3 -m xkv_lmcache_autostart.health [server | vllm [PORT]]`: whether it serves, for the probes of containers.

`server` asks the LMCache server's front end (`LMC_HTTP_HOST`, `LMC_HTTP_PORT`), which is on loopback, where probes from
outside do not reach; `vllm` asks vLLM at PORT (default 8000). Without a word it is what process 1 runs: the server, or
vLLM at its `--port`. The gateway is never asked: without it everything is a miss, and a restart would not help.
Exit code 0: it answers 200; 1: it does not; 2: wrong usage. Imports little, since it runs every few seconds.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SERVER_MODULE: Final = "lmcache.v1.multiprocess.http_server"
ANSWER_S: Final = 4.0
"""How long it may take to answer. Probes need a timeout above it."""

_VLLM_PORT: Final = 8000
_ANY: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Target:
    """Where to ask."""

    host: str
    port: int
    path: str


def server(environ: Mapping[str, str]) -> Target:
    """The LMCache server's front end, by the launcher's own variables."""
    host = environ.get("LMC_HTTP_HOST", "").strip()
    return Target(_ANY.get(host, host), int(environ.get("LMC_HTTP_PORT", "").strip() or 8080), "/healthcheck")


def vllm(port: int = _VLLM_PORT) -> Target:
    """vLLM's API on loopback."""
    return Target("127.0.0.1", port, "/health")


def of_command(command: Sequence[str], environ: Mapping[str, str]) -> Target:
    """What a container is asked whose process 1 is `command`."""
    if SERVER_MODULE in command or "--exec" in command:
        return server(environ)
    for position, word in enumerate(command):
        name, _, value = word.partition("=")
        if name == "--port":
            return vllm(int(value or command[position + 1]))
    return vllm()


def answers(target: Target) -> bool:
    """Whether GET is answered with 200 within `ANSWER_S`, never through a proxy."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=ANSWER_S)
    try:
        connection.request("GET", target.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(arguments: Sequence[str]) -> int:
    """The exit code for `arguments`."""
    try:
        match arguments:
            case []:
                words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
                target = of_command([word for word in words if word], os.environ)
            case ["server"]:
                target = server(os.environ)
            case ["vllm"]:
                target = vllm()
            case ["vllm", port]:
                target = vllm(int(port))
            case _:
                raise ValueError(f"unknown words {' '.join(arguments)!r}")
    except (ValueError, IndexError) as error:
        print(f"health: {error}; usage: health [server | vllm [PORT]]", file=sys.stderr)
        return 2
    if answers(target):
        return 0
    print(f"health: no 200 from http://{target.host}:{target.port}{target.path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
