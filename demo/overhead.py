"""`make bench`: what the launcher costs a command that wants no server, beside an interpreter that does nothing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 15


def overhead_ms(rounds: int = ROUNDS) -> tuple[float, float]:
    """The medians, in ms, of `python3 -m xkv_lmcache_autostart -- true` and of `python3 -c pass`, run by turns."""
    plain = [sys.executable, "-c", "pass"]
    launched = [sys.executable, "-m", "xkv_lmcache_autostart", "--", "true"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMC_")}
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for command, times in zip((launched, plain), took, strict=True):
            begun = time.perf_counter()
            subprocess.run(command, env=environ, check=True)
            times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(took[0]), statistics.median(took[1])


if __name__ == "__main__":
    launched_ms, plain_ms = overhead_ms()
    print(
        f"launcher without a server: {launched_ms:.0f} ms, python3 -c pass: {plain_ms:.0f} ms, "
        f"overhead {launched_ms - plain_ms:.0f} ms (median of {ROUNDS})"
    )
