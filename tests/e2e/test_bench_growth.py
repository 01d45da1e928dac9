"""`xkv bench growth`: costs of stores of several sizes, a kill -9 of each, and what comes back is counted and compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lmcache]

COMMAND = [sys.executable, "-m", "xkv_lmcache.cli", "bench", "growth"]
COSTS = ["hit_us", "miss_us", "wrapped_hit_us", "wrapped_miss_us", "load_us", "store_us"]


def test_measures_each_size_and_finds_every_object_after_a_kill(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [*COMMAND, str(tmp_path), "--objects", "200,2000", "--samples", "5", "--json", str(figures)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    (place,) = json.loads(figures.read_text())
    assert (place["folder"], place["object_bytes"], place["batch"]) == (str(tmp_path), 4096, 64)
    small, large = place["sizes"]
    assert (small["objects"], large["objects"]) == (200, 2000)
    for size in (small, large):
        assert all(size[cost] > 0 for cost in COSTS)
        assert size["checked_objects"] >= 1000
        assert size["open_s_per_million"] == pytest.approx(size["open_s"] / size["objects"] * 1e6)
    assert all(small[f"{cost}_ratio"] == 1 for cost in COSTS)
    assert large["hit_us_ratio"] == pytest.approx(large["hit_us"] / small["hit_us"])
    grown = large["resident_bytes"] - small["resident_bytes"]
    assert large["resident_bytes_per_object"] == pytest.approx(grown / 1800)
    # The store says itself what it finds when it opens: a new one, then after each kill.
    assert [f", {count} objects\n" in ran.stderr for count in (0, 200, 2000)] == [True] * 3
    assert "restart, s per million objects" in ran.stdout
    # Nothing is left behind.
    assert list(tmp_path.iterdir()) == [figures]


@pytest.mark.parametrize("objects", ["2000,200", "10", "many", "200,200"])
def test_says_which_sizes_it_cannot_use(objects: str, tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path), "--objects", objects]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert f"--objects {objects}: give growing numbers from 64 on" in ran.stderr
