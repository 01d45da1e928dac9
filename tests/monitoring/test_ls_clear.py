"""`xkv ls` and `xkv clear`, on a running gateway and on a store that nobody has open, and a clear that is killed."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from demo.gateway import GatewayProcess
from tests.monitoring.conftest import await_that
from tests.plugin.client import Client, contents

SIZE = 10_000
OBJECTS = 10


def xkv(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xkv_lmcache.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def keys(model: str, count: int = OBJECTS) -> list[str]:
    return [f"{model}@00000001@0@{number:08x}" for number in range(count)]


def fill(params: dict[str, Any], namespace: str, model: str, read: int = 0) -> None:
    with Client(**params, namespace=namespace) as client:
        assert client.set({key: contents(1, SIZE) for key in keys(model)})
        assert all(client.get(dict.fromkeys(keys(model)[:read], SIZE)).values())


def entries(listing: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {
        (each["namespace"], each["model"]): (each["objects"], each["bytes"], each["never_read"])
        for each in listing["usage"]
    }


def whole(never_read: int) -> tuple[int, int, int]:
    return (OBJECTS, OBJECTS * SIZE, never_read)


def test_a_running_gateway(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        at = ("--port", gateway.port)
        fill(gateway.params, "", "llama", read=4)
        fill(gateway.params, "rev 2", "llama")
        fill(gateway.params, "rev 2", "[bold]")
        listed = xkv("ls", *at)
        assert listed.returncode == 0, listed.stderr
        for text in (
            "30 objects of 293.0 KiB",
            "86.7 % of the bytes never read",
            "[bold]",
            "60.0 %",
            "100.0 %",
        ):
            assert text in listed.stdout, listed.stdout
        found = json.loads(xkv("ls", "--json", *at).stdout)
        assert entries(found) == {
            ("", "llama"): whole(OBJECTS - 4),
            ("rev 2", "llama"): whole(OBJECTS),
            ("rev 2", "[bold]"): whole(OBJECTS),
        }
        state = gateway.status()
        assert state["never_read"] == 3 * OBJECTS - 4
        assert all(0 <= found["time_us"] - each["newest_use_us"] < 60e6 for each in found["usage"])

        cleared = xkv("clear", "--namespace", "rev 2", "--model", "llama", "--yes", *at)
        assert cleared.stdout == "removed 10 objects of 97.7 KiB\n", cleared.stderr
        assert entries(json.loads(xkv("ls", "--json", *at).stdout)) == {
            ("", "llama"): whole(OBJECTS - 4),
            ("rev 2", "[bold]"): whole(OBJECTS),
        }
        with Client(**gateway.params, namespace="rev 2") as client:
            assert not any(client.exists(keys("llama")))
            assert all(client.exists(keys("[bold]")))
        assert xkv("clear", "--namespace", "", "--yes", *at).stdout.startswith("removed 10 objects")
        assert xkv("clear", "--all", "--yes", *at).stdout.startswith("removed 10 objects")
        assert gateway.status()["objects"] == 0
        assert "cleared on request" in gateway.log.read_text()


def test_a_token_is_wanted_where_the_gateway_wants_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    with GatewayProcess(tmp_path / "store", token_file=token) as gateway:
        for command in (("ls",), ("clear", "--all", "--yes")):
            refused = xkv(*command, "--port", gateway.port)
            assert refused.returncode == 1 and "the token is missing or wrong" in refused.stderr
            assert xkv(*command, "--port", gateway.port, "--token-file", token).returncode == 0


def test_a_store_that_nobody_has_open(tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill({"store": str(store), "store_gb": 0.1}, "a", "llama", read=3)
    fill({"store": str(store), "store_gb": 0.1}, "b", "llama")
    found = json.loads(xkv("ls", "--json", store).stdout)
    assert entries(found) == {("a", "llama"): whole(OBJECTS - 3), ("b", "llama"): whole(OBJECTS)}, (
        "also after a restart"
    )
    assert xkv("clear", "--namespace", "a", "--yes", store).stdout.startswith("removed 10 objects")
    with Client(store=str(store), store_gb=0.1, namespace="b") as client:
        assert all(client.exists(keys("llama")))
        for command in (("ls",), ("clear", "--all", "--yes")):
            refused = xkv(*command, store)
            assert refused.returncode == 1 and "in use" in refused.stderr, refused.stderr
    assert entries(json.loads(xkv("ls", "--json", store).stdout)) == {("b", "llama"): whole(OBJECTS)}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("clear", "--yes"), 2, "name what to remove"),
        (("clear", "--yes", "--all", "--model", "m"), 2, "name what to remove"),
        (("clear", "--all"), 2, "add --yes"),
        (("ls", "--port", "x"), 2, "is not a port"),
        (("ls", "missing"), 1, "there is no store"),
        (("clear", "missing", "--all", "--yes"), 1, "there is no store"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = xkv(*arguments)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert not (tmp_path / "missing").exists()


def test_a_clear_that_is_killed_leaves_whole_objects_and_is_finished_by_the_next(tmp_path: Path) -> None:
    """kill -9 of the gateway while it clears, at different moments."""
    many, sizes = keys("old", 2000), dict.fromkeys(keys("old", 2000), 100)
    kept = {key: contents(2, 100) for key in keys("kept", 100)}
    data = contents(1, 100)
    source = random.Random(6)
    with GatewayProcess(tmp_path / "store") as gateway:

        def removed() -> int | None:
            return gateway.status()["removed"] or None

        with Client(**gateway.params, namespace="new") as client:
            assert client.set(kept)
        for _ in range(4):
            with Client(**gateway.params, namespace="old") as client:
                assert client.set(dict.fromkeys(many, data))
            at = ("--port", str(gateway.port))
            command = [sys.executable, "-m", "xkv_lmcache.cli", "clear", "--namespace", "old", "--yes", *at]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as clear:
                await_that("the first removal", removed)
                time.sleep(source.uniform(0, 0.005))  # Not for an event: any moment will do.
                gateway.end(9)
                clear.wait(60)
            gateway.start()
            with Client(**gateway.params, namespace="old") as client:
                left = [key for key, there in zip(many, client.exists(many), strict=True) if there]
                assert client.get({key: sizes[key] for key in left}) == dict.fromkeys(left, data)
            done = xkv("clear", "--namespace", "old", "--yes", *at)
            assert done.stdout.startswith(f"removed {len(left)} objects"), done.stdout + done.stderr
            with Client(**gateway.params, namespace="new") as client:
                assert client.get(dict.fromkeys(kept, 100)) == kept
