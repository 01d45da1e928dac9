"""`xkv bench store`: the engine beside fio, and what it must not touch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LoopDevices
from tests.gateway.command import XKV, environment
from tests.plugin.client import Client
from xkv_lmcache.cli.bench.choice import Choice, best
from xkv_lmcache.cli.bench.trial import Case, Round

MIB = 1 << 20
QUICK = ["--mib", "16", "--fragment-bytes", "64KiB", "--depth", "4", "--seconds", "0.1", "--rounds", "2"]

SPREAD = r"[0-9.]+ \([0-9.]+-[0-9.]+\) *"


def bench(path: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it on `path`, briefly."""
    return subprocess.run(
        [*XKV, "bench", "store", str(path), *QUICK, *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_folder_is_measured_beside_fio_and_left_empty(tmp_path: Path) -> None:
    folder, figures = tmp_path / "folder", tmp_path / "figures.json"
    folder.mkdir()
    done = bench(folder, "--fragment-bytes", "256KiB", "--json", figures)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    report = json.loads(figures.read_text())
    operations = ["read", "randread", "write", "randwrite"]
    assert len(report["rounds"]) == 2
    for round_ in report["rounds"]:
        assert [case["operation"] for case in round_] == [name for name in operations for _ in range(2)]
        for case in round_:
            assert case["fragment_bytes"] in (65536, 262144) and case["depth"] == 4
            assert all(case[name]["gb_per_s"] > 0 for name in ("uring", "pool", "fio")), case
    for title in ("sequential reads", "random reads", "sequential writes", "random writes"):
        assert f"{title}, 2 rounds" in done.stdout
    # Ours have a ratio, fio has none.
    assert len(re.findall(rf"(?:io_uring|pool) +│ {SPREAD} │ {SPREAD} │", done.stdout)) == 2 * 4 * 2
    assert len(re.findall(rf"fio +│ {SPREAD} │ +│", done.stdout)) == 4 * 2
    best, last = report["best"], done.stdout.splitlines()[-1]
    assert last.startswith(
        f"Best here: fragment_bytes={best['fragment_bytes']}, depth=4, io_engine={best['io_engine']}, "
    )
    assert f"LMC_XKV_FRAG={best['fragment_bytes']} " in last
    assert f"XKV_GATEWAY_FRAGMENT_BYTES={best['fragment_bytes']} XKV_GATEWAY_DEPTH=4 " in last


def test_ours_is_measured_alone_where_there_is_no_other(tmp_path: Path) -> None:
    done = bench(tmp_path, PATH="")
    assert done.returncode == 0, done.stderr
    assert "fio is not installed; there is nothing to compare with" in done.stderr
    assert "Best here: " in done.stdout
    assert re.search(rf"io_uring +│ {SPREAD} │ +│", done.stdout) and "│ fio" not in done.stdout


def test_a_blank_drive_stays_blank(loop_devices: LoopDevices) -> None:
    (drive,) = loop_devices(1, 32 * MIB)
    done = bench(drive)
    assert done.returncode == 0, done.stderr
    content = drive.read_bytes()
    assert any(content[MIB : 17 * MIB]) and not any(content[:MIB]) and not any(content[17 * MIB :])
    with Client(store=str(drive)) as client:
        assert client.set({"key": b"x" * 5000})


def test_a_foreign_drive_is_refused_and_untouched_until_forced(loop_devices: LoopDevices) -> None:
    (drive,) = loop_devices(1, 32 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(drive)], check=True)
    before = drive.read_bytes()
    refused = bench(drive)
    assert refused.returncode == 1
    assert (
        f"{drive}: holds what looks like an ext2/3/4 filesystem" in refused.stderr
        and "--force" in refused.stderr
    )
    only_read = bench(drive, "--read-only")
    assert only_read.returncode == 0, only_read.stderr
    assert "random reads" in only_read.stdout and "writes" not in only_read.stdout
    assert drive.read_bytes() == before
    forced = bench(drive, "--force")
    assert forced.returncode == 0, forced.stderr
    assert f"{drive}: holds what looks like an ext2/3/4 filesystem; destroyed" in forced.stderr
    with Client(store=str(drive)) as client:
        assert client.set({"key": b"x" * 5000})


def test_a_store_is_refused_and_untouched_and_never_measured_in_use(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Client(store=str(store), store_gb=0.03) as client:
        assert client.set({"key": b"x" * 5000})
    file = store / "xkv-store.dat"
    before = file.read_bytes()
    refused = bench(file)
    assert refused.returncode == 1
    assert f"{file}: holds drive 1 of 1 of the store" in refused.stderr
    assert bench(file, "--read-only").returncode == 0
    assert file.read_bytes() == before
    with Client(store=str(store)) as client:
        assert client.get({"key": 5000}) == {"key": b"x" * 5000}
        for flag in ("--force", "--read-only"):
            in_use = bench(file, flag)
            assert in_use.returncode == 1 and f"{file}: in use by another process" in in_use.stderr
    with Client(store=str(store)) as client:
        assert client.get({"key": 5000}) == {"key": b"x" * 5000}
    assert bench(file, "--force").returncode == 0
    with Client(store=str(store)) as client:
        assert client.exists(["key"]) == [False]


@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_whenever_it_ends(word: signal.Signals, tmp_path: Path) -> None:
    command = [*XKV, "bench", "store", str(tmp_path), *QUICK, "--rounds", "1000"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        assert "round 1 of 1000" in process.stderr.readline()
        process.send_signal(word)
        process.wait(60)
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())


def test_fio_holds_the_lock_when_we_are_killed(tmp_path: Path) -> None:
    image, programs, seen = tmp_path / "drive.img", tmp_path / "programs", tmp_path / "seen"
    image.touch()
    os.truncate(image, 32 * MIB)
    programs.mkdir()
    os.mkfifo(seen)
    fio = programs / "fio"
    flock = shutil.which("flock")
    fio.write_text(
        f"#!/bin/sh\nkill -9 $PPID\n{flock} -n {image} true && echo free >{seen} || echo held >{seen}\n"
    )
    fio.chmod(0o755)
    assert bench(image, PATH=f"{programs}:{os.environ['PATH']}").returncode == -signal.SIGKILL
    assert seen.read_text() == "held\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fragment-bytes", "5000"], "--fragment-bytes='5000'"),
        (["--fragment-bytes", "auto"], "--fragment-bytes=auto is no size"),
        (["--read-only"], "a folder, where a file would be made"),
        (["--read-only", "--force"], "leave it out, or --force"),
        (["--io-engine", "threads"], "--io-engine"),
        (["--fragment-bytes", "16MiB", "--depth", "4096"], "come to 64.0 GiB"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_what_is_too_small_is_refused_and_stays_so(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for flag in ("--force", "--read-only"):
        done = bench(empty, flag)
        assert done.returncode == 1 and f"{empty}: 0 bytes" in done.stderr, done.stderr
    assert empty.stat().st_size == 0
    large = bench(tmp_path, "--mib", str(1 << 30))
    assert large.returncode == 1 and "lower --mib" in large.stderr


def test_of_what_does_nearly_as_well_the_smallest_is_chosen() -> None:
    def figures(rates: dict[tuple[int, int], float]) -> Round:
        return {
            Case(operation, *choice): {"uring": {"gb_per_s": rate}, "pool": {"gb_per_s": rate / 2}}
            for operation in ("read", "write")
            for choice, rate in rates.items()
        }

    rates = {(4096, 8): 1.0, (4096, 32): 1.92, (8192, 8): 1.93, (8192, 32): 2.0}
    choice, share = best([figures(rates)], ["uring", "pool"])
    assert choice == Choice(4096, 32, "uring") and share == pytest.approx(0.96)
    # The median counts, not what happened once.
    rounds = [figures(rates), figures({**rates, (4096, 32): 0.1}), figures({**rates, (4096, 8): 9.0})]
    assert best(rounds, ["uring", "pool"])[0] == Choice(4096, 32, "uring")
