"""The two ways to serve from containers, asked and read as `demo.stack` does it."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from demo.stack import (
    CHUNK,
    RECONNECTED,
    Answer,
    Hits,
    answers_200,
    complete,
    free_ports,
    prefetches,
)
from tests.containers.podman import CPU, Container, settle

OBJECTS = 5
READY_S = 600.0
"""Two cores that others use, too."""

_HTTP = httpx.Client(trust_env=False)


def text(seed: int, length: int = OBJECTS * CHUNK + 70) -> str:
    """A prompt for the random model, whose tokens are bytes."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def vllm_arguments(port: int) -> list[str]:
    """What follows `vllm serve` for the small model, deterministic."""
    return [
        "/model", "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching",
        "--disable-hybrid-kv-cache-manager", "--max-model-len", "4608", "--max-num-seqs", "4",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


@dataclass
class Ports:
    """The ports of one stack on the host's network."""

    gateway: int
    zmq: int
    http: int
    vllm: int
    gateway_metrics: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        return cls(*free_ports(6))


@dataclass
class Stack:
    """A server and a vLLM that are asked by their ports; `log` is whose log has the server's lines.

    Args:
        ports: where they listen.
        server: the container that the LMCache server is in.
        vllm: the container that vLLM is in; the same one with `LMC_ENABLE=1`.
    """

    ports: Ports
    server: Container
    vllm: Container
    _mark: int = field(default=0, init=False)

    def wait_for_server(self) -> None:
        url = f"http://127.0.0.1:{self.ports.http}/healthcheck"
        self.server.wait_for("a ready LMCache server", lambda: answers_200(url), READY_S)

    def wait_for_vllm(self) -> None:
        url = f"http://127.0.0.1:{self.ports.vllm}/health"
        self.vllm.wait_for("a ready vLLM", lambda: answers_200(url), READY_S)

    def wait_until_registered_again(self, after: int) -> None:
        """Returns when vLLM has registered with a server that was restarted; `after`: length of its log then."""
        self.vllm.wait_for_text(RECONNECTED, 180, after)

    def settle(self, objects: int) -> None:
        """Returns when L1 holds `objects` objects at least and L2 has answered the store of each."""

        def settled() -> bool | None:
            answer = _HTTP.get(f"http://127.0.0.1:{self.ports.http}/status", timeout=10).json()
            manager = answer["storage_manager"]
            stores, l1 = manager["store_controller"], manager["l1_manager"]
            busy = stores["pending_keys_count"] or stores["in_flight_task_count"]
            locked = l1["write_locked_count"] or l1["read_locked_count"]
            return (l1["total_object_count"] >= objects and not busy and not locked) or None

        settle("the end of LMCache's stores", settled, 120, self.server.log)

    def ask(self, prompt: str) -> tuple[Answer, Hits]:
        """A greedy completion, and what the server found for it."""
        mark = len(self.server.log())
        answer = complete(f"http://127.0.0.1:{self.ports.vllm}/v1/completions", prompt, 32)
        found = list(prefetches(self.server.log()[mark:]))
        assert len(found) <= 1, found
        return answer, found[0] if found else Hits(0, 0, 0)

    def loaded(self) -> int:
        """Objects that this server process loaded from L2, by its own counter."""
        metrics = _HTTP.get(f"http://127.0.0.1:{self.ports.http}/metrics", timeout=10).text
        found = re.search(
            r"^lmcache_mp_l2_prefetch_load_completed_chunks_total ([0-9.e+]+)$", metrics, re.MULTILINE
        )
        return int(float(found[1])) if found else 0


def settings(ports: Ports) -> dict[str, str]:
    """The server's, with the store in a gateway on loopback."""
    return {
        "LMC_PORT": str(ports.zmq),
        "LMC_HTTP_PORT": str(ports.http),
        "LMC_L1_GB": "1",
        "LMC_CHUNK": str(CHUNK),
        "LMC_XKV_PORT": str(ports.gateway),
        "LMC_XKV_SLOTS": "256",
        "LMC_XKV_NAMESPACE": "containers",
    }


def apart(ports: Ports, model: Path) -> Stack:
    """The LMCache server in one container (`--exec`), vLLM in another."""
    server = Container(
        CPU, ["-m", "xkv_lmcache_autostart", "--exec"], settings(ports), options=["--entrypoint=python3"]
    )
    waiting = {
        "LMC_WAIT_FOR_SERVER": "1",
        "LMC_WAIT_S": "300",
        "LMC_PORT": str(ports.zmq),
        "LMC_HTTP_PORT": str(ports.http),
        "LMC_CHUNK": str(CHUNK),
    }
    vllm = Container(CPU, vllm_arguments(ports.vllm), waiting, options=[f"--volume={model}:/model:ro"])
    return Stack(ports, server, vllm)


def together(ports: Ports, model: Path) -> Stack:
    """Both in one container, by the image's entry point and `LMC_ENABLE=1`."""
    one = Container(
        CPU,
        vllm_arguments(ports.vllm),
        {**settings(ports), "LMC_ENABLE": "1", "LMC_STOP_S": "20"},
        options=[f"--volume={model}:/model:ro"],
    )
    return Stack(ports, one, one)


def check(answer: Answer, hits: Hits, tokens: tuple[int, ...], *, l1: int = 0, l2: int = 0) -> None:
    """Where an answer came from, and that it is the same."""
    assert (hits.l1, hits.l2) == (l1, l2)
    assert answer.cached_tokens == (l1 + l2) * CHUNK
    assert answer.tokens == tokens
