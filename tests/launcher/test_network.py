"""What the launcher and the real server connect to: nothing but this machine's loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.harness import COMMAND, Launcher

pytestmark = pytest.mark.lmcache

START_S = 240.0
COMMAND_LINE = [sys.executable, str(COMMAND), "ask=HTTP_PORT", "wait"]
SETTINGS = {"LMC_WAIT_S": str(START_S), "LMC_STOP_S": "30"}


def start_s(launcher: Launcher) -> float:
    """How long the server took to be ready, as the launcher says."""
    line = launcher.expect("the LMCache server is ready", timeout=START_S)
    return float(json.loads(line)["after_s"])


def addresses(trace: str) -> Iterator[str]:
    """The internet addresses that processes tried to connect to."""
    for line in trace.splitlines():
        if "connect(" in line and "sa_family=AF_INET" in line:
            found = re.search(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', line)
            assert found is not None, line
            yield found[1] or found[2]


def test_nothing_beyond_loopback_is_connected_to_and_the_start_is_not_delayed(tmp_path: Path) -> None:
    """In a network of its own, where every attempt to report usage would fail or wait, traced by strace."""
    if shutil.which("strace") is None or os.geteuid() != 0:
        pytest.skip("needs strace and root; scripts/setup.py test-tools brings strace")
    with Launcher(tmp_path, COMMAND_LINE, real=True, settings=SETTINGS) as launcher:
        undisturbed_s = start_s(launcher)
        launcher.expect("command: ready")
        launcher.send(signal.SIGTERM)
        assert launcher.wait(60) == 0
    trace = tmp_path / "trace"
    prefix = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    prefix += ["strace", "--seccomp-bpf", "-f", "-qq", "-e", "trace=connect", "-o", str(trace)]
    with Launcher(tmp_path, COMMAND_LINE, real=True, prefix=prefix, settings=SETTINGS) as launcher:
        isolated_s = start_s(launcher)
        launcher.expect("command: ready")
        launcher.server().terminate()
        launcher.expect("the LMCache server is back", timeout=START_S)
        launcher.send(signal.SIGTERM)
        assert launcher.wait(60) == 0
        launcher.expect("command: the server answers 200")
    connected = list(addresses(trace.read_text()))
    assert "127.0.0.1" in connected, "the front end was asked whether it is healthy"
    assert [address for address in connected if not address.startswith("127.") and address != "::1"] == []
    print(f"ready after {undisturbed_s:.1f} s, after {isolated_s:.1f} s without a network, traced")
    assert isolated_s < undisturbed_s * 1.5 + 5
