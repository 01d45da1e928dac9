"""The promise from containers: what one stored another finds, the server restarted or everything in one container."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.containers.conftest import SharedMemory
from tests.containers.podman import gateway, owned_folder, podman
from tests.containers.serving import OBJECTS, Ports, apart, check, text, together

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

PROMPT = text(1)


def test_apart_then_together(model: Path, tmp_path: Path, shared_memory: SharedMemory) -> None:
    ports = Ports.free()
    with gateway(owned_folder(tmp_path / "store"), ports.gateway) as store:
        store.wait_for_text("serving a store", 60)

        # Three containers: gateway, server (--exec), vLLM that waits for it.
        stack = apart(ports, model)
        begun = time.monotonic()
        with stack.vllm, stack.server:
            stack.wait_for_server()
            server_s = time.monotonic() - begun
            assert stack.server.exec("python3", "-m", "xkv_lmcache_autostart.health") == (0, "")
            stack.wait_for_vllm()
            vllm_s = time.monotonic() - begun
            assert stack.vllm.exec("python3", "-m", "xkv_lmcache_autostart.health") == (0, "")
            # --exec and the waiting launcher are gone: the servers are process 1 themselves.
            assert "lmcache.v1.multiprocess.http_server" in stack.server.exec("cat", "/proc/1/cmdline")[1]
            assert "xkv_lmcache_autostart" not in stack.vllm.exec("cat", "/proc/1/cmdline")[1]

            cold, hits = stack.ask(PROMPT)
            check(cold, hits, cold.tokens)
            assert len(set(cold.tokens)) > 1
            stack.settle(OBJECTS)
            check(*stack.ask(PROMPT), cold.tokens, l1=OBJECTS)
            assert stack.loaded() == 0

            mark = len(stack.vllm.log())
            podman("restart", "--time=30", stack.server.name)
            stack.wait_for_server()
            stack.wait_until_registered_again(mark)
            check(*stack.ask(PROMPT), cold.tokens, l2=OBJECTS)
            assert stack.loaded() == OBJECTS

            assert stack.vllm.stop() == 0
            # It raises the signal again when it is done, which process 1 of a container does not feel: 0, not 143.
            assert stack.server.stop() == 0
        shared_memory.forget_semaphores()
        assert shared_memory.left() == set()
        assert store.exec("xkv", "gateway", "status", f"--port={ports.gateway}")[1].count("0 open") == 1

        # One container: another server and another vLLM, which never saw the prompt.
        stack = together(ports, model)
        begun = time.monotonic()
        with stack.server:
            stack.wait_for_vllm()
            both_s = time.monotonic() - begun
            assert stack.server.exec("python3", "-m", "xkv_lmcache_autostart.health") == (0, "")
            assert stack.server.exec("python3", "-m", "xkv_lmcache_autostart.health", "server") == (0, "")
            check(*stack.ask(PROMPT), cold.tokens, l2=OBJECTS)
            assert stack.loaded() == OBJECTS
            assert stack.server.stop() == 0
        assert store.stop() == 0
    print(f"server {server_s:.0f} s, server and vLLM {vllm_s:.0f} s, in one container {both_s:.0f} s")
