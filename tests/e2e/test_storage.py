"""What LMCache stored through the plugin is there, byte for byte, for the next process, however the last one ended."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.bench import plugin
from demo.stack import CHUNK, Service, answers_200, free_ports, prefetches
from tests.backends import Backend

pytestmark = [pytest.mark.lmcache, pytest.mark.matrix]

PROGRAM = Path(__file__).parent / "storage_process.py"
COUNT = 48
SIZE = 1_000_001
"""Bytes of an object: seven whole fragments and a piece."""


@contextmanager
def storage_process(
    mode: str, backend: Backend, store: Path, **adapter_params: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """LMCache's storage manager in a process that has done `mode`, and what it said."""
    statistics = {"stats_path": str(store / f"{mode}.json"), "stats_interval_s": 0.05}
    adapter = json.dumps(plugin(**backend.params(store, store_gb=0.5, **statistics, **adapter_params)))
    command = [sys.executable, str(PROGRAM), mode, adapter, str(COUNT), str(SIZE)]
    log = store / f"{mode}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ["close", "kill -9"])
def test_another_process_loads_what_was_stored(end: str, backend: Backend, tmp_path: Path) -> None:
    with storage_process("store", backend, tmp_path) as (process, said):
        assert said == {"stored": COUNT}
        if end == "close":
            process.communicate(input="", timeout=60)
            assert process.returncode == 0
        else:
            process.kill()
            process.wait()
    with storage_process("load", backend, tmp_path) as (_, said):
        assert said == {"hits": COUNT, "l1": 0, "wrong": 0}


def test_another_namespace_shares_nothing(backend: Backend, tmp_path: Path) -> None:
    with storage_process("store", backend, tmp_path, namespace="revision 1"):
        pass
    with storage_process("load", backend, tmp_path, namespace="revision 2") as (_, said):
        assert said == {"hits": 0, "l1": 0, "wrong": 0}
    with storage_process("load", backend, tmp_path, namespace="revision 1") as (_, said):
        assert said == {"hits": COUNT, "l1": 0, "wrong": 0}


VARIABLES = {
    "store": "LMC_XKV_STORE",
    "store_gb": "LMC_XKV_STORE_GB",
    "host": "LMC_XKV_HOST",
    "port": "LMC_XKV_PORT",
    "shm_dir": "LMC_XKV_SHM_DIR",
    "batch_slots": "LMC_XKV_SLOTS",
    "reopen_after_s": "LMC_XKV_REOPEN_S",
}
"""The launcher's variable for each of the plugin's parameters that are used here."""


def variable_text(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


SEQUENCES = 3
TOKENS = 4 * CHUNK


@contextmanager
def server(params: dict[str, Any], log: Path) -> Iterator[tuple[Service, int, int]]:
    """The LMCache server, run in place by the launcher; its service, ZMQ port and HTTP port."""
    port, http_port = free_ports(2)
    env = {
        "LMC_PORT": str(port),
        "LMC_HTTP_PORT": str(http_port),
        "LMC_L1_GB": "1",
        "LMC_CHUNK": str(CHUNK),
        **{VARIABLES[name]: variable_text(value) for name, value in params.items()},
    }
    with Service([sys.executable, "-m", "xkv_lmcache_autostart", "--exec"], log, env) as service:
        health = f"http://127.0.0.1:{http_port}/healthcheck"
        service.wait_for("a ready LMCache server", lambda: answers_200(health), 180)
        yield service, port, http_port


def drive(port: int, http_port: int, first: int = 0, count: int = SEQUENCES, interval_s: float = 0) -> str:
    """Has LMCache's benchmark of a server look `count` sequences up, store what is missing and retrieve it."""
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "server", "--mode", "cpu"]
    command += ["--transfer-mode", "lmcache_driven", "--rpc-url", f"tcp://127.0.0.1:{port}"]
    command += [
        "--url",
        f"http://127.0.0.1:{http_port}",
        "--num-tokens",
        str(TOKENS),
        "--interval",
        str(interval_s),
    ]
    command += ["--start", str(first), "--end", str(first + count)]
    command += ["--kvcache-shape-spec", "(2,128,16,4,64):float16:4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "CHECKSUM MISMATCH" not in ran.stdout
    return ran.stdout


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_server_finds_everything_in_l2(
    how: signal.Signals, backend: Backend, tmp_path: Path
) -> None:
    params = backend.params(tmp_path / "store", store_gb=0.5)
    with server(params, tmp_path / "first.log") as (service, port, http_port):
        output = drive(port, http_port)
        assert output.count("/cold] STORE: stored") == SEQUENCES, output
        service.process.send_signal(how)
        service.process.wait(60)
    with server(params, tmp_path / "second.log") as (service, port, http_port):
        output = drive(port, http_port)
        assert "STORE: stored" not in output, output
        assert output.count("RETRIEVE: retrieved") == 2 * SEQUENCES, output
        found = list(prefetches(service.log.since(0)))
    # Each sequence is looked up twice. What was read leaves L1, in newer versions not at once.
    assert [(hits.requested, hits.l1, hits.l2) for hits in found[::2]] == [(4, 0, 4)] * SEQUENCES
    assert [(hits.requested, hits.l1 + hits.l2) for hits in found[1::2]] == [(4, 4)] * SEQUENCES
