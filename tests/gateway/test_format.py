"""`xkv gateway format`: a new store on purpose, and what is there only with --force."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess
from tests.conftest import LoopDevices
from tests.gateway.command import XKV, environment, xkv
from tests.plugin.client import Client


def test_a_new_store_has_the_size_and_fragments_asked_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    flags = ["--store-gb", "64MiB", "--fragment-bytes", "64KiB", "--yes"]
    done = xkv("format", store, *flags)
    assert done.returncode == 0, done.stderr
    assert "slots of 65536 bytes, 0 objects" in done.stdout and "does not exist yet" in done.stderr
    assert (store / "xkv-store.dat").stat().st_size == 64 << 20
    with GatewayProcess(store, fragment_bytes="auto") as gateway:
        assert gateway.status()["fragment_bytes"] == 65536


def test_what_is_there_is_lost_only_with_force(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Client(store=str(store), store_gb=0.05) as client:
        assert client.set({"key": b"x" * 5000})
    refused = xkv("format", store, "--yes")
    assert refused.returncode == 1 and "--force" in refused.stderr and "holds drive 1 of 1" in refused.stderr
    unasked = xkv("format", store, "--force")
    assert unasked.returncode == 2 and "add --yes" in unasked.stderr
    with Client(store=str(store)) as client:
        assert client.get({"key": 5000}) == {"key": b"x" * 5000}
        in_use = xkv("format", store, "--force", "--yes")
        assert in_use.returncode == 1 and "in use by another process" in in_use.stderr
    assert xkv("format", store, "--force", "--yes").returncode == 0
    with Client(store=str(store)) as client:
        assert client.exists(["key"]) == [False]

    foreign = tmp_path / "drive.img"
    foreign.write_bytes(b"important" + bytes(64 << 20))
    before = foreign.read_bytes()
    refused = xkv("format", foreign, "--yes")
    assert refused.returncode == 1 and "data that is not ours" in refused.stderr
    assert foreign.read_bytes() == before
    assert xkv("format", foreign, "--yes", "--force").returncode == 0
    assert xkv("check", foreign).returncode == 0


@pytest.mark.parametrize(("answer", "made"), [("y", True), ("n", False)])
def test_it_asks_on_a_terminal(answer: str, made: bool, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        command = [*XKV, "gateway", "format", str(tmp_path / "store"), "--store-gb", "64MiB"]
        process = subprocess.Popen(command, env=environment(), stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        shown = b""
        while b"Make a new store?" not in shown:
            shown += terminal.read(1024)
        assert not (tmp_path / "store").exists(), "it asks first"
        terminal.write(answer.encode() + b"\n")
        assert (process.wait(60) == 0) == made
    assert (tmp_path / "store").exists() == made


def test_a_filesystem_on_a_block_device(loop_devices: LoopDevices) -> None:
    drives = loop_devices(2, 32 << 20)
    with drives[1].open("r+b") as drive:
        # The signature of ext4, and data in the last block, where other formats keep theirs.
        drive.seek(1080)
        drive.write(b"\x53\xef")
        drive.seek(-512, os.SEEK_END)
        drive.write(b"EFI PART")
    refused = xkv("format", *drives, "--yes")
    assert refused.returncode == 1, refused.stderr
    assert f"{drives[0]}: blank" in refused.stderr
    assert f"{drives[1]}: holds what looks like an ext2/3/4 filesystem" in refused.stderr
    assert xkv("format", *drives, "--yes", "--force").returncode == 0
    with drives[1].open("rb") as drive:
        drive.seek(-512, os.SEEK_END)
        assert not any(drive.read())
    with Client(store=[str(drive) for drive in drives]) as client:
        assert client.set({"key": b"x" * 300_000})
    assert xkv("check", *drives).returncode == 0


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    done = xkv("format", tmp_path / "store", "--yes", "--store-gb", "big", "--fragment-bytes", "5000")
    assert (
        done.returncode == 2
        and "--store-gb='big'" in done.stderr
        and "--fragment-bytes='5000'" in done.stderr
    )
    assert xkv("format").returncode == 2
    assert not (tmp_path / "store").exists()
    small = xkv("format", tmp_path / "store", "--yes", "--store-gb", "1MiB")
    assert small.returncode == 1 and "are too few for a store" in small.stderr
