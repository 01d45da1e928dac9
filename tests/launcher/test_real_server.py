"""The launcher with the real LMCache server and our plugin in it."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.launcher.harness import COMMAND, Launcher

pytestmark = pytest.mark.lmcache

START_S = 240.0
"""The longest start of the server on a machine that does other things too."""


def get(launcher: Launcher, path: str) -> object:
    with urllib.request.urlopen(f"http://127.0.0.1:{launcher.http_port}{path}", timeout=30) as answer:
        return json.load(answer)


def test_the_server_runs_survives_its_death_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(COMMAND), "ask=HTTP_PORT", "wait"]
    settings = {
        "HF_TOKEN": "hunter2",
        "NVIDIA_API_KEY": "hunter2",
        "LMC_WAIT_S": str(START_S),
        "LMC_STOP_S": "20",
    }
    with Launcher(tmp_path, command, real=True, settings=settings) as launcher:
        launcher.expect("command: ready", timeout=START_S)
        status = get(launcher, "/status")
        assert isinstance(status, dict)
        assert status["is_healthy"] is True
        seen = get(launcher, "/env")
        assert isinstance(seen, dict)
        assert "hunter2" not in json.dumps(seen)
        assert (seen["LMCACHE_TRACK_USAGE"], seen["PYTHONHASHSEED"]) == ("false", "0")
        first = launcher.server()
        addresses = {
            found.laddr.ip for found in first.net_connections("tcp") if found.status == psutil.CONN_LISTEN
        }
        assert addresses == {"127.0.0.1"}
        assert (tmp_path / "store").is_dir()

        first.kill()
        launcher.expect("was ended by SIGKILL under the command; it is restarted")
        launcher.expect("the LMCache server is back, with an empty L1", timeout=START_S)
        assert launcher.server().pid != first.pid
        status = get(launcher, "/status")
        assert isinstance(status, dict)
        assert status["is_healthy"] is True

        launcher.send(signal.SIGTERM)
        assert launcher.wait(timeout=60) == 0
        launcher.expect("command: the server answers 200")
        launcher.expect("LMCache HTTP server stopped")
        launcher.expect_nothing_left()


def test_a_server_that_refuses_its_arguments_ends_the_start(tmp_path: Path) -> None:
    """What the examination before the start cannot see ends the start all the same, with the reason."""
    command = [sys.executable, str(COMMAND), "wait"]
    settings = {"LMC_WAIT_S": str(START_S), "LMC_EXTRA_ARGS": "--l2-store-policy no-such-policy"}
    with Launcher(tmp_path, command, real=True, settings=settings) as launcher:
        assert launcher.wait(timeout=START_S) == 1
        line = launcher.expect("the LMCache server did not start: it exited with code")
        assert "no-such-policy" in line
        assert not any("command: ready" in line for line in launcher.lines)
        launcher.expect_nothing_left()
