"""The real thing, started and driven: launcher, LMCache server with our plugin, vLLM; and what is read off them."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil

CHUNK = 256
"""Tokens per object."""

ROOT = Path(__file__).resolve().parent.parent

SERVER_MODULE = "lmcache.v1.multiprocess.http_server"
RECONNECTED = "healthy again — resuming normal operation"
"""What LMCache's part of vLLM logs when it has registered with a server that came back."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PREFETCH = re.compile(
    r"Prefetch request completed \(L1\+L2\): (\d+)/(\d+) retained keys \((\d+) L1, (\d+) L2\)"
)

T = TypeVar("T")

# One for all: each client reads the certificate store. No proxy stands before loopback.
_HTTP = httpx.Client(trust_env=False)


class StackError(Exception):
    """Something that was started is not there, with the last lines it wrote."""


@dataclass(frozen=True)
class Answer:
    """One completion: its token ids, seconds to the first one, and the prompt's tokens in all and out of a cache."""

    tokens: tuple[int, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Hits:
    """What LMCache's server found for one lookup, in objects."""

    requested: int
    l1: int
    l2: int


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def die_with_parent() -> None:
    """Runs in a new child: it gets SIGTERM when the process that started it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Log:
    """A file that a process writes to, read from where a mark was set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    def mark(self) -> int:
        return self.path.stat().st_size

    def since(self, mark: int) -> str:
        with self.path.open("rb") as file:
            file.seek(mark)
            return _ANSI.sub("", file.read().decode(errors="replace"))

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.since(0).splitlines()[-lines:])


class Service:
    """A process of its own session and log, which ends when this one does.

    Args:
        command: argument vector.
        log: file for its stdout and stderr.
        env: variables added to this process's own.
        grace_s: seconds between SIGTERM and SIGKILL in `stop`.
    """

    def __init__(self, command: list[str], log: Path, env: dict[str, str], grace_s: float = 40) -> None:
        self.log = Log(log)
        self.grace_s = grace_s
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 (nothing here has threads yet)
            )

    def wait_for(self, what: str, probe: Callable[[], T | None], timeout_s: float) -> T:
        """The first result of `probe` that is not None; StackError when the process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (found := probe()) is not None:
                return found
            if (code := self.process.poll()) is not None:
                raise StackError(
                    f"ended with exit code {code} before {what}; {self.log.path}:\n{self.log.tail()}"
                )
            if time.monotonic() > deadline:
                raise StackError(
                    f"no sign of {what} within {timeout_s:g} s; {self.log.path}:\n{self.log.tail()}"
                )
            time.sleep(0.1)

    def wait_for_text(self, text: str, mark: int, timeout_s: float) -> None:
        self.wait_for(f"the line {text!r}", lambda: text in self.log.since(mark) or None, timeout_s)

    def family(self) -> list[psutil.Process]:
        """The processes below this one, itself first."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> int:
        """Ends it and everything below it; returns its exit code."""
        family = self.family()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            process.kill()
        return int(self.process.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def answers_200(url: str) -> bool | None:
    """True when `url` answers 200, None otherwise: a probe for `Service.wait_for`."""
    try:
        return _HTTP.get(url, timeout=2).status_code == 200 or None
    except httpx.HTTPError:
        return None


def vllm_command(model: Path, port: int) -> list[str]:
    """vLLM's API server for a small model on CPU, deterministic: float32, greedy, nothing cached by vLLM itself."""
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "model",
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching",
        "--disable-hybrid-kv-cache-manager", "--max-model-len", "4608", "--max-num-seqs", "4",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Fewer processes, each of which imports everything again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
}


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For short prompts: threads that wait for each other are many times slower on a machine that is busy with other things."""


class Serving:
    """vLLM with, or without, the LMCache server and our plugin in front of it, started by the launcher.

    Args:
        model: folder of the model.
        log: file for what all of it writes.
        adapter_params: parameters of the plugin, such as `{"store": ..., "store_gb": ...}`; None: vLLM alone.
        env: further variables for the launcher.
    """

    def __init__(
        self, model: Path, log: Path, adapter_params: dict[str, Any] | None, env: dict[str, str] | None = None
    ) -> None:
        self.zmq_port, self.http_port, self.vllm_port = free_ports(3)
        self.cached = adapter_params is not None
        settings = dict(VLLM_ENVIRONMENT)
        if self.cached:
            settings |= {
                "LMC_ENABLE": "1",
                "LMC_PORT": str(self.zmq_port),
                "LMC_HTTP_PORT": str(self.http_port),
                "LMC_CHUNK": str(CHUNK),
                "LMC_L1_GB": "1",
                "LMC_XKV_PARAMS": json.dumps(adapter_params),
            }
        launcher = [sys.executable, "-m", "xkv_lmcache_autostart", "--", *vllm_command(model, self.vllm_port)]
        self.service = Service(launcher, log, settings | (env or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.stop()

    def server_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http_port}{path}"

    def wait_until_ready(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Returns when vLLM serves; `say` is told of the step on the way."""
        if self.cached:
            health = self.server_url("/healthcheck")
            self.service.wait_for("a ready LMCache server", lambda: answers_200(health), 180)
            say("the LMCache server is ready; vLLM loads the model")
        url = f"http://127.0.0.1:{self.vllm_port}/health"
        self.service.wait_for("a ready vLLM", lambda: answers_200(url), 600)

    def server_pid(self) -> int:
        """The process id of the LMCache server."""
        for process in self.service.family():
            try:
                if SERVER_MODULE in process.cmdline():
                    return process.pid
            except psutil.NoSuchProcess:
                continue
        raise StackError(f"no LMCache server is running; {self.service.log.path}:\n{self.service.log.tail()}")

    def end_server(self, how: signal.Signals) -> None:
        """Sends `how` to the LMCache server; returns when the launcher's new one serves and vLLM is registered with it.

        L1 is empty then, and so are the server's counters.
        """
        old, mark = self.server_pid(), self.service.log.mark()
        os.kill(old, how)

        def replaced() -> bool | None:
            try:
                return self.server_pid() != old or None
            except StackError:
                return None

        self.service.wait_for("another LMCache server", replaced, 120)
        self.service.wait_for(
            "a ready LMCache server", lambda: answers_200(self.server_url("/healthcheck")), 180
        )
        self.service.wait_for_text(RECONNECTED, mark, 60)

    def settle(self, objects: int) -> None:
        """Returns when L1 holds `objects` objects at least and L2 has answered the store of each."""

        def settled() -> bool | None:
            manager = _HTTP.get(self.server_url("/status"), timeout=10).json()["storage_manager"]
            stores, l1 = manager["store_controller"], manager["l1_manager"]
            busy = stores["pending_keys_count"] or stores["in_flight_task_count"]
            locked = l1["write_locked_count"] or l1["read_locked_count"]
            return (l1["total_object_count"] >= objects and not busy and not locked) or None

        self.service.wait_for("the end of LMCache's stores", settled, 120)

    def clear_l1(self) -> None:
        """Empties L1 alone."""
        httpx.post(self.server_url("/cache/clear"), timeout=30).raise_for_status()

    def counters(self) -> dict[str, float]:
        """The server's unlabelled Prometheus counters and gauges by name."""
        text = _HTTP.get(self.server_url("/metrics"), timeout=10).text
        found = re.findall(r"^([a-z_0-9]+) ([0-9.e+-]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def l2_objects_loaded(self) -> int:
        """Objects that this server process loaded from L2, by its own counter."""
        return int(self.counters().get("lmcache_mp_l2_prefetch_load_completed_chunks_total", 0))

    def vllm_tokens_taken(self) -> int:
        """Tokens that this vLLM took from the LMCache server, by its own counter."""
        text = _HTTP.get(f"http://127.0.0.1:{self.vllm_port}/metrics", timeout=10).text
        found = re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def ask(self, prompt: str, max_tokens: int = 32) -> tuple[Answer, Hits]:
        """Greedy completion of `prompt`, and what the LMCache server found for it (zeros when there is none)."""
        mark = self.service.log.mark()
        answer = complete(f"http://127.0.0.1:{self.vllm_port}/v1/completions", prompt, max_tokens)
        hits = list(prefetches(self.service.log.since(mark)))
        if len(hits) > 1:
            raise StackError(f"one request, {len(hits)} lookups with hits in {self.service.log.path}")
        return answer, hits[0] if hits else Hits(0, 0, 0)


def prefetches(text: str) -> Iterator[Hits]:
    """The server's lookups with hits, in the order of its log."""
    for found in _PREFETCH.finditer(text):
        yield Hits(int(found[2]), int(found[3]), int(found[4]))


def complete(url: str, prompt: str, max_tokens: int) -> Answer:
    body = {
        "model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    begun, first = time.monotonic(), None
    with _HTTP.stream("POST", url, json=body, timeout=600) as response:
        if response.status_code != 200:
            raise StackError(
                f"vLLM answered {response.status_code}: {response.read().decode(errors='replace')}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("choices"):
                first = first or time.monotonic()
                tokens += event["choices"][0].get("token_ids") or []
            usage = event.get("usage") or usage
    if first is None or len(tokens) != max_tokens:
        raise StackError(f"vLLM sent {len(tokens)} of {max_tokens} tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(tuple(tokens), first - begun, int(usage["prompt_tokens"]), int(cached))


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that whatever was started is stopped. A `StackError` and
    Ctrl-C are said and end the program, with code 1 and 130."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except StackError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; everything that was started has ended", file=sys.stderr)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
