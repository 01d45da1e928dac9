"""The manifests of `k8s/cpu`, played by podman: the same promise, from what a cluster would get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.kube import Player
from tests.containers.podman import podman
from tests.containers.serving import OBJECTS, Stack, check, text

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

PROMPT = text(1)


@pytest.fixture
def player(tmp_path: Path, model: Path) -> Iterator[Player]:
    made = Player(tmp_path, model)
    yield made
    made.down()


def test_sidecar_then_in_pod(player: Player) -> None:
    """Two containers of a pod store, the server's is restarted; then a pod with one container finds it."""
    gateway = player.up("cpu/sidecar", "gateway")["gateway"]
    gateway.wait_for_text("serving a store", 60)
    assert "io_uring is refused" in gateway.log()
    assert gateway.log().count("using threads instead") == 1
    folders = {path.name: path.stat() for path in player.folders.iterdir()}
    assert {(each.st_uid, each.st_mode & 0o7777) for each in folders.values()} == {(10001, 0o770)}

    pod = player.up("cpu/sidecar", "model")
    stack = Stack(player.ports, pod["lmcache"], pod["vllm"])
    stack.wait_for_server()
    stack.wait_for_vllm()
    assert pod["lmcache"].exec("id", "-u")[1].strip() == "10001"
    assert pod["lmcache"].exec("python3", "-m", "xkv_lmcache_autostart.health", "server") == (0, "")
    cold, hits = stack.ask(PROMPT)
    check(cold, hits, cold.tokens)
    stack.settle(OBJECTS)
    mark = len(pod["vllm"].log())
    podman("restart", "--time=30", pod["lmcache"].name)
    stack.wait_for_server()
    stack.wait_until_registered_again(mark)
    check(*stack.ask(PROMPT), cold.tokens, l2=OBJECTS)
    assert stack.loaded() == OBJECTS
    player.down("model")

    pod = player.up("cpu/in-pod", "model")
    stack = Stack(player.ports, pod["vllm"], pod["vllm"])
    stack.wait_for_vllm()
    check(*stack.ask(PROMPT), cold.tokens, l2=OBJECTS)
    assert stack.loaded() == OBJECTS
    assert pod["vllm"].stop() == 0
    assert gateway.stop() == 0
    assert os.listdir(player.folders / "run") == []
