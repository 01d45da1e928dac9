"""A short soak through each backend; `make soak` runs a long one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.soak import soak

SECONDS = float(os.environ.get("XKV_SOAK_SECONDS", "40"))


@pytest.mark.parametrize("kind", ["embedded", "gateway"])
def test_no_wrong_byte_and_nothing_grows(kind: str, tmp_path: Path) -> None:
    outcome = soak(kind, tmp_path, SECONDS)
    assert outcome.faults == []
    counts = outcome.counts
    for name in ("loads checked", "misses", "stores", "removals", "evicted"):
        assert counts[name] > 100, counts
    assert counts["store_poisoned"] == 0
    assert outcome.longest_s < 30
    print(dict(counts), f"{outcome.longest_s:.2f} s", outcome.footprints)


def test_no_wrong_byte_while_the_gateway_is_killed_again_and_again(tmp_path: Path) -> None:
    outcome = soak("gateway", tmp_path, SECONDS, kill_every_s=4)
    assert outcome.faults == []
    assert outcome.counts["kills"] >= 3 and outcome.counts["loads checked"] > 100, outcome.counts
