"""`xkv gateway check`: damage on the drives is found, named and, when asked, repaired."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess
from tests.conftest import LoopDevices
from tests.gateway.command import XKV, environment, xkv
from tests.plugin.client import Client, contents

FRAGMENT = 4096


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flip(drive: Path, data: bytes, offset: int = 0) -> None:
    """Inverts a byte of the fragment that begins like `data`."""
    wanted = data[:64]
    with drive.open("r+b", buffering=0) as file:
        at = 0
        while block := os.pread(file.fileno(), FRAGMENT, at):
            if block.startswith(wanted):
                os.pwrite(file.fileno(), bytes([block[offset] ^ 0xFF]), at + offset)
                os.fsync(file.fileno())
                return
            at += FRAGMENT
    raise AssertionError("the fragment is not on the drive")


def filled(folder: Path, count: int) -> dict[str, bytes]:
    """Objects of a store that a gateway wrote and closed."""
    objects = {f"key-{i}": contents(i, 10_000) for i in range(count)}
    with GatewayProcess(folder, store_gb=0.05) as gateway:
        with Client(**gateway.params) as client:
            assert client.set(objects)
        assert gateway.end() == 0
    return objects


def test_flipped_bytes_are_found_and_repaired(tmp_path: Path) -> None:
    store = tmp_path / "store"
    drive = store / "xkv-store.dat"
    objects = filled(store, 30)
    clean = xkv("check", store, "--json")
    assert clean.returncode == 0, clean.stderr
    report = json.loads(clean.stdout)
    assert report["clean"] and report["objects"] == 30 and report["bytes"] == 300_000
    assert report["slots_used"] == 90

    flip(drive, objects["key-3"], 1000)
    flip(drive, objects["key-7"][FRAGMENT:], 4095)
    before = digest(drive)
    found = xkv("check", store, "--json")
    report = json.loads(found.stdout)
    assert found.returncode == 1 and not report["clean"] and report["objects_damaged"] == 2
    assert sorted(damaged["key"] for damaged in report["damaged"]) == ["key-3", "key-7"]
    text = xkv("check", store)
    assert text.returncode == 1 and "2 objects with bytes" in text.stdout and "--repair" in text.stdout
    assert digest(drive) == before, "nothing is changed unless asked"

    repaired = xkv("check", store, "--repair")
    assert repaired.returncode == 0 and "repaired" in repaired.stdout
    again = xkv("check", store)
    assert again.returncode == 0 and "28 objects" in again.stdout and "no damage" in again.stdout
    with Client(store=str(store)) as client:
        got = client.get({key: 10_000 for key in objects})
        assert got == {**objects, "key-3": None, "key-7": None}
        assert client.set(objects), "the next store writes them again"
        assert client.get({key: 10_000 for key in objects}) == objects


def test_a_torn_header_is_found_and_mended(tmp_path: Path) -> None:
    store = tmp_path / "store"
    objects = filled(store, 3)
    with (store / "xkv-store.dat").open("r+b") as file:
        file.seek(FRAGMENT)
        file.write(bytes(FRAGMENT))
    found = xkv("check", store)
    assert found.returncode == 1 and "ONE COPY OF ITS HEADER IS DAMAGED" in found.stdout
    assert xkv("check", store, "--repair").returncode == 0
    assert xkv("check", store).returncode == 0
    with Client(store=str(store)) as client:
        assert client.get({key: 10_000 for key in objects}) == objects


def test_a_store_in_use_and_one_that_is_none(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store", store_gb=0.05):
        for flags in ([], ["--repair"]):
            done = xkv("check", tmp_path / "store", *flags)
            assert done.returncode == 1 and "in use by another process" in done.stderr
    for flags in ([], ["--repair"]):
        done = xkv("check", tmp_path / "nothing", *flags)
        assert done.returncode == 1 and "there is no store" in done.stderr
    assert not (tmp_path / "nothing").exists()
    assert xkv("check").returncode == 2


def test_block_devices_with_two_drives(loop_devices: LoopDevices) -> None:
    drives = loop_devices(2, 32 << 20)
    objects = {f"key-{i}": contents(i, 50_000) for i in range(20)}
    with Client(store=[str(drive) for drive in drives], fragment_bytes=FRAGMENT) as client:
        assert client.set(objects)
    assert xkv("check", *drives).returncode == 0
    one = xkv("check", drives[0])
    assert one.returncode == 1 and "the store has 2 drives" in one.stderr
    data = objects["key-11"]
    for piece in range(0, len(data), FRAGMENT):
        try:
            flip(drives[1], data[piece:])
            break
        except AssertionError:
            continue
    report = json.loads(xkv("check", *reversed(drives), "--json").stdout)
    assert [damaged["key"] for damaged in report["damaged"]] == ["key-11"]
    assert [drive["name"] for drive in report["drives"]] == [str(drive) for drive in drives]


@pytest.mark.parametrize("repair", [False, True])
def test_an_interrupt_changes_nothing(repair: bool, tmp_path: Path) -> None:
    """The drive of an interrupted examination is slow: reads that take seconds, by strace."""
    store = tmp_path / "store"
    drive = store / "xkv-store.dat"
    objects = filled(store, 3)
    flip(drive, objects["key-1"])
    before = digest(drive)
    slow = ["-e", "trace=io_uring_enter,pread64", "-e", "inject=io_uring_enter:delay_enter=1000000"]
    log = tmp_path / "strace.log"
    command = [*XKV, "gateway", "check", str(store), *(["--repair"] if repair else [])]
    process = subprocess.Popen(
        ["strace", "-f", "-o", str(log), *slow, *command],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not log.exists() or "io_uring_enter(" not in log.read_text():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "nothing was changed" in error
    assert digest(drive) == before
