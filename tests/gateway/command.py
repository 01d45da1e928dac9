"""Runs `xkv` as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

XKV = (sys.executable, "-m", "xkv_lmcache.cli")


def environment(**variables: str) -> dict[str, str]:
    """The test's own without the gateway's variables, and `variables`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("XKV_")} | variables


def xkv(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    prefix: tuple[str, ...] = (),
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        [*prefix, *XKV, "gateway", *map(str, arguments)],
        env=environment() if env is None else dict(env),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
