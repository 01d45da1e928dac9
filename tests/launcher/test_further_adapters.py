"""`LMC_L2_EXTRA`: a real Redis behind ours, so that nodes share objects. Needs an LMCache that keeps failed loads to
itself, which the versions before 0.5.6 do not."""

from __future__ import annotations

import json
import mmap
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.bench import plugin
from demo.stack import CHUNK, Hits, Service, answers_200, prefetches
from tests.launcher.harness import REPOSITORY, await_value, environment, free_ports, run
from xkv_lmcache_autostart import machine
from xkv_lmcache_autostart.preflight import L2_EXTRA_SINCE

pytestmark = [pytest.mark.lmcache, pytest.mark.matrix]

SEQUENCES = 2
OBJECTS = 4
"""Objects of a sequence."""

COUNT, SIZE = 12, 1_000_001

VERSION = machine.lmcache_version()
ALLOWED = VERSION is not None and VERSION >= L2_EXTRA_SINCE
only_where_allowed = pytest.mark.skipif(
    not ALLOWED, reason="LMCache before 0.5.6 is refused, which a test shows"
)


class Redis:
    """A client of the few commands that are needed here."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, *words: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(f"*{len(words)}\r\n".encode())
            connection.sendall(b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words))
            with connection.makefile("rb") as answer:
                line = answer.readline().decode()
                return answer.read(int(line[1:])).decode() if line[0] == "$" else line[1:].strip()

    def keys(self) -> int:
        return int(self.ask("DBSIZE"))

    def calls(self, command: str) -> int:
        """How often `command` was called since `CONFIG RESETSTAT`."""
        lines = self.ask("INFO", "commandstats").splitlines()
        found = [line for line in lines if line.startswith(f"cmdstat_{command}:")]
        return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server; scripts/setup.py test-tools brings one")
    (port,) = free_ports(1)
    argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        try:
            client = Redis(port)

            def answers() -> bool:
                try:
                    return client.ask("PING") == "PONG"
                except OSError:
                    return False

            await_value(answers)
            yield client
        finally:
            process.kill()


@contextmanager
def server(store: Path, log: Path, redis: Redis) -> Iterator[tuple[Service, int, int]]:
    """The LMCache server with our store and Redis behind it; its service, ZMQ port and HTTP port."""
    port, http_port = free_ports(2)
    env = {
        "LMC_PORT": str(port),
        "LMC_HTTP_PORT": str(http_port),
        "LMC_L1_GB": "1",
        "LMC_CHUNK": str(CHUNK),
        "LMC_XKV_STORE": str(store),
        "LMC_XKV_STORE_GB": "0.5",
        "LMC_XKV_STATS_PATH": str(store.with_suffix(".json")),
        "LMC_L2_EXTRA": json.dumps(
            {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
        ),
    }
    with Service([sys.executable, "-m", "xkv_lmcache_autostart", "--exec"], log, env) as service:
        health = f"http://127.0.0.1:{http_port}/healthcheck"
        service.wait_for("a ready LMCache server", lambda: answers_200(health), 180)
        yield service, port, http_port


def drive(port: int, http_port: int) -> str:
    """LMCache's benchmark of a server: looks sequences up, stores what is missing, retrieves it."""
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "server", "--mode", "cpu"]
    command += ["--transfer-mode", "lmcache_driven", "--rpc-url", f"tcp://127.0.0.1:{port}"]
    command += [
        "--url",
        f"http://127.0.0.1:{http_port}",
        "--num-tokens",
        str(OBJECTS * CHUNK),
        "--interval",
        "0",
    ]
    command += ["--start", "0", "--end", str(SEQUENCES), "--kvcache-shape-spec", "(2,128,16,4,64):float16:4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "CHECKSUM MISMATCH" not in ran.stdout
    return ran.stdout


def counted(store: Path) -> dict[str, Any]:
    """Our plugin's own counts, as of when its server ended."""
    found: dict[str, Any] = json.loads(store.with_suffix(".json").read_text())
    return found


def loaded(found: list[Hits]) -> int:
    """Objects that came from L2, where every lookup found everything (the second in a row maybe still in L1)."""
    assert all(hits.l1 + hits.l2 == OBJECTS for hits in found)
    return sum(hits.l2 for hits in found)


@only_where_allowed
def test_objects_are_in_both_and_found_in_either(redis: Redis, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with server(first, tmp_path / "first.log", redis) as (_, port, http_port):
        assert drive(port, http_port).count("STORE: stored") >= SEQUENCES
        await_value(lambda: redis.keys() == SEQUENCES * OBJECTS, 60)
    assert counted(first)["store_stored"] == SEQUENCES * OBJECTS

    # A node whose own store has nothing finds everything in Redis.
    with server(second, tmp_path / "second.log", redis) as (service, port, http_port):
        output = drive(port, http_port)
        found = list(prefetches(service.log.since(0)))
    assert "STORE: stored" not in output, output
    assert loaded(found) >= SEQUENCES * OBJECTS
    assert counted(second)["operations"]["get"]["hits"] == 0

    # The first node has its own copy: nothing is fetched from Redis, nor missed when Redis has forgotten it.
    redis.ask("FLUSHALL")
    redis.ask("CONFIG", "RESETSTAT")
    with server(first, tmp_path / "again.log", redis) as (service, port, http_port):
        output = drive(port, http_port)
        found = list(prefetches(service.log.since(0)))
    assert "STORE: stored" not in output, output
    assert loaded(found) >= SEQUENCES * OBJECTS
    assert redis.calls("get") == 0
    assert counted(first)["operations"]["get"]["hits"] == loaded(found)


def manage(mode: str, store: Path, redis: Redis) -> dict[str, int]:
    """LMCache's storage manager with our store and Redis, in a process that does `mode` and ends."""
    ours = plugin(store=str(store), store_gb=0.25, stats_path=str(store.with_suffix(".json")))
    adapters = [ours, {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}]
    program = Path(__file__).parent / "failed_loads.py"
    done = subprocess.run(
        [sys.executable, str(program), mode, json.dumps(adapters), str(COUNT), str(SIZE)],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return said


def damage(store: Path) -> None:
    """Change a byte of every object in a store, whose contents are those of `storage_process.contents`."""
    import numpy

    (path,) = store.iterdir()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for index in range(COUNT):
            place = data.find(numpy.random.default_rng(index).bytes(SIZE)[:4096])
            assert place > 0
            data[place] ^= 1


@only_where_allowed
def test_failed_loads_are_stored_to_neither(redis: Redis, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert manage("store", store, redis) == {"stored": COUNT}
    assert redis.keys() == COUNT
    damage(store)
    redis.ask("FLUSHALL")
    assert manage("load", store, redis) == {"hits": 0, "l1": 0}
    stats = counted(store)
    assert (stats["operations"]["get"]["keys"], stats["operations"]["get"]["hits"]) == (COUNT, 0)
    assert stats["operations"]["set"]["keys"] == 0
    assert redis.keys() == 0


def test_an_lmcache_that_would_spread_failed_loads_is_refused(redis: Redis, tmp_path: Path) -> None:
    port, http_port = free_ports(2)
    done = run(
        "--check",
        LMC_PORT=str(port),
        LMC_HTTP_PORT=str(http_port),
        LMC_L1_GB="0.1",
        LMC_XKV_STORE=str(tmp_path / "s"),
        LMC_XKV_STORE_GB="0.25",
        LMC_XKV_NAMESPACE="n",
        LMC_XKV_SLOTS="64",
        LMC_L2_EXTRA=json.dumps({"type": "resp", "host": "127.0.0.1", "port": redis.port}),
    )
    refusal = "stores the unfilled buffers of failed loads to every adapter"
    assert (refusal in done.stdout) is not ALLOWED
    assert done.returncode == (0 if ALLOWED else 1), done.stdout


@pytest.mark.skipif(VERSION != (0, 5, 4), reason="reproduced with LMCache 0.5.4 alone")
def test_what_the_refusal_prevents(redis: Redis, tmp_path: Path) -> None:
    """LMCache 0.5.4 hands the unfilled buffers of failed loads to every adapter; ours refuses them, Redis not."""
    store = tmp_path / "store"
    assert manage("store", store, redis) == {"stored": COUNT}
    damage(store)
    redis.ask("FLUSHALL")
    assert manage("load", store, redis)["hits"] == 0
    assert counted(store)["store_poisoned"] == COUNT
    assert redis.keys() == COUNT
