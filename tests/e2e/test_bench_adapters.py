"""`xkv bench l2`: adapters side by side, every load compared with what was stored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xkv_lmcache.cli.bench import chart

pytestmark = [pytest.mark.lmcache]


def test_measures_ours_beside_a_peer_and_the_floor(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    names = ["xkv full", "xkv gateway", "floor", "fs_native"]
    command = [sys.executable, "-m", "xkv_lmcache.cli", "bench", "l2", str(tmp_path)]
    command += ["--against", ",".join(names), "--mib", "1", "--batch", "4", "--rounds", "2"]
    command += ["--total-mib", "8", "--json", str(figures)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    (case,) = json.loads(figures.read_text())
    assert (case["object_bytes"], case["batch"], len(case["rounds"])) == (1 << 20, 4, 2)
    for round_ in case["rounds"]:
        for name in ("xkv full", "xkv gateway", "fs_native"):
            assert round_[name]["verified_bytes"] == 8 << 20
            assert all(
                round_[name][key] > 0 for key in ("store", "durable", "cold", "again", "kept", "p50", "hit")
            )
        assert round_["floor"]["hit"] > 0
        assert "again" not in round_["floor"]
    # A title is broken where the table is narrower.
    assert "xkv full / other, within a round" in " ".join(ran.stdout.split())
    # Nothing is left behind.
    assert list(tmp_path.iterdir()) == [figures]


def test_says_which_adapter_it_does_not_know(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xkv_lmcache.cli", "bench", "l2", str(tmp_path), "--against", "mooncake"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "mooncake: no such adapter; choose of" in ran.stderr


def test_draws_its_figures_or_says_what_is_missing(tmp_path: Path) -> None:
    picture = tmp_path / "figures.svg"
    if chart.missing():
        command = [
            sys.executable,
            "-m",
            "xkv_lmcache.cli",
            "bench",
            "l2",
            str(tmp_path),
            f"--chart={picture}",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 1
        assert "matplotlib is not installed; pip install matplotlib" in ran.stderr
        return
    figures = {"again": 2.0, "durable": 1.0, "cpu": 0.1, "p50": 300.0}
    rounds = [{"xkv full": figures, "fs_native": figures, "fio": {"again": 3.0}}] * 2
    chart.draw([{"folder": "d", "object_bytes": 1 << 20, "batch": 1, "rounds": rounds}], picture)
    drawn = picture.read_text()
    assert all(f">{name}</text>" in drawn for name in ("xkv full", "fs_native", "fio"))
