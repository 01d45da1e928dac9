"""The systemd units: what systemd's own checks say of them. No systemd runs where tests do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launcher.harness import REPOSITORY
from xkv_lmcache.gateway_settings import GatewaySettings
from xkv_lmcache_autostart.settings import Settings

UNITS = {"xkv-gateway.service": 15, "lmcache-server.service": 40}
"""Unit -> the exposure it may have at most, in tenths, of `systemd-analyze security`."""


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a command that exists, since systemd looks."""
    for name in UNITS:
        text = (REPOSITORY / "systemd" / name).read_text()
        changed = re.sub(r"^ExecStart=/opt/\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
        assert changed != text
        (tmp_path / name).write_text(changed)
    return tmp_path


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_it(unit: str, units: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", units / unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_it_is_hardened(unit: str, units: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={UNITS[unit]}", units / unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("unit", UNITS)
def test_its_variables_are_settings(unit: str) -> None:
    found = re.findall(r"^Environment=(\w+)=", (REPOSITORY / "systemd" / unit).read_text(), re.MULTILINE)
    known = {f"LMC_{name.upper()}" for name in Settings.model_fields}
    known |= {f"XKV_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    assert found
    assert set(found) - known <= {"HOME", "PYTHONHASHSEED"}
