"""The supervisor with real processes.

The LMCache server is a stand-in (`standin/`), because these tests start it dozens of times and the real
one takes 10 s and a GiB each time; `test_real_server.py` runs the real one.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher.harness import (
    COMMAND,
    STANDIN,
    Launcher,
    Plan,
    await_value,
    environment,
    free_ports,
    marked,
)

ABOVE_GRACE_S = 12.0
"""More than the grace of 5 s that the tests set and the time the machine needs around it."""


def command(*steps: str) -> list[str]:
    return [sys.executable, str(COMMAND), *steps]


@pytest.fixture(params=[False, True], ids=["plain", "pid1"])
def pid1(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(("step", "code"), [("exit=0", 0), ("exit=7", 7), ("kill=9", 137), ("kill=15", 143)])
def test_the_commands_exit_code_is_passed_on(tmp_path: Path, pid1: bool, step: str, code: int) -> None:
    with Launcher(tmp_path, command(step), pid1=pid1) as launcher:
        assert launcher.wait() == code
        launcher.expect("stand-in server: got TERM")
        launcher.expect_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_before_the_server(tmp_path: Path, pid1: bool, number: int) -> None:
    """The command still finds the server while it ends: vLLM's last stores go there."""
    with Launcher(tmp_path, command("ask=HTTP_PORT", "wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.send(number)
        assert launcher.wait() == 0
        launcher.expect("command: the server answers 200")
        launcher.expect_nothing_left()


def test_a_hang_up_goes_to_the_command(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("on=SIGHUP", "wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGHUP)
        launcher.expect("command: got SIGHUP")
        assert launcher.server().is_running()
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        launcher.expect_nothing_left()


def test_a_hang_up_that_ends_the_command_ends_all(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGHUP)
        assert launcher.wait() == 129
        launcher.expect_nothing_left()


def test_user_signals_go_to_the_command_alone(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("on=SIGUSR1", "wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGUSR1)
        launcher.expect("command: got SIGUSR1")
        assert launcher.server().is_running()
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143


def test_what_ignores_term_is_killed_after_the_grace(tmp_path: Path, pid1: bool) -> None:
    settings = {"LMC_STOP_S": "2", "XKV_STANDIN": "ignore-term"}
    with Launcher(
        tmp_path, command("ignore=SIGTERM", "child", "wait"), pid1=pid1, settings=settings
    ) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGTERM)
        start = time.monotonic()
        assert launcher.wait() == 137
        assert 2.0 <= time.monotonic() - start < ABOVE_GRACE_S
        launcher.expect("stand-in server: got TERM")
        launcher.expect_nothing_left()


def test_a_second_term_ends_the_grace(tmp_path: Path, pid1: bool) -> None:
    settings = {"LMC_STOP_S": "60", "XKV_STANDIN": "ignore-term"}
    with Launcher(tmp_path, command("ignore=SIGTERM", "wait"), pid1=pid1, settings=settings) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGTERM)
        launcher.expect("stopping on SIGTERM")
        time.sleep(0.6)  # signals closer together are one request
        launcher.send(signal.SIGTERM)
        assert launcher.wait(timeout=10) == 137
        launcher.expect_nothing_left()


def test_two_terms_at_once_are_one_request(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("ask=HTTP_PORT", "wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGTERM)
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 0


def test_term_before_the_server_is_ready(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings={"XKV_STANDIN": "deaf"}) as launcher:
        launcher.expect("stand-in server: start")
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        assert not any("command: ready" in line for line in launcher.lines)
        launcher.expect_nothing_left()


def test_orphans_are_reaped(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("orphan", "wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")

        def children_and_zombies() -> bool:
            children = psutil.Process(launcher.pid).children(recursive=True)
            return len(children) >= 2 and all(child.status() != psutil.STATUS_ZOMBIE for child in children)

        await_value(children_and_zombies)
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143


def test_orphaned_descendants_end_with_the_command(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("daemon", "child", "exit=4"), pid1=pid1) as launcher:
        launcher.expect("the command is started")
        assert launcher.wait(ABOVE_GRACE_S) == 4
        launcher.expect_nothing_left(timeout=1.0)


def test_killing_the_command_ends_all(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("wait"), pid1=pid1) as launcher:
        launcher.expect("command: ready")
        launcher.command().kill()
        assert launcher.wait() == 137
        launcher.expect_nothing_left()


def test_killing_the_launcher_ends_all(tmp_path: Path, pid1: bool) -> None:
    settings = {"LMC_STOP_S": "1", "XKV_STANDIN": "ignore-term"}
    steps = command("ignore=SIGTERM", "daemon", "child", "wait")
    with Launcher(tmp_path, steps, pid1=pid1, settings=settings) as launcher:
        launcher.expect("command: ready")
        assert len(marked(launcher.mark)) >= 6, "launcher, watchdog, server, command, child and daemon"
        launcher.send(signal.SIGKILL)
        launcher.wait()
        launcher.expect_nothing_left()


def test_children_have_their_grace_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with Launcher(tmp_path, command("bow", "wait")) as launcher:
        launcher.expect("command: ready")
        launcher.send(signal.SIGKILL)
        launcher.expect("command: bows out")
        launcher.expect_nothing_left(timeout=3.0)


def test_a_dead_watchdog_is_replaced(tmp_path: Path, pid1: bool) -> None:
    settings = {"LMC_STOP_S": "1", "XKV_STANDIN": "ignore-term"}
    with Launcher(tmp_path, command("ignore=SIGTERM", "wait"), pid1=pid1, settings=settings) as launcher:
        launcher.expect("command: ready")
        known = {launcher.server().pid, launcher.command().pid}
        (watchdog,) = [child for child in psutil.Process(launcher.pid).children() if child.pid not in known]
        watchdog.kill()
        launcher.expect("the watchdog died and is replaced")
        launcher.send(signal.SIGKILL)
        launcher.expect_nothing_left()


def test_a_killed_server_is_restarted(tmp_path: Path, pid1: bool) -> None:
    settings = {"XKV_STANDIN": "fail-second", "XKV_STANDIN_STARTS": str(tmp_path / "starts")}
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings=settings) as launcher:
        launcher.expect("command: ready")
        launcher.server().kill()
        launcher.expect("was ended by SIGKILL under the command; it is restarted")
        assert "the drive is on fire" in launcher.expect("did not start again")
        launcher.expect("the LMCache server is back, with an empty L1")
        launcher.expect("stand-in server: start 3")
        assert launcher.command().is_running()
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        launcher.expect_nothing_left()


def test_a_killed_server_is_ignored(tmp_path: Path, pid1: bool) -> None:
    with Launcher(
        tmp_path, command("wait"), pid1=pid1, settings={"LMC_ON_SERVER_EXIT": "ignore"}
    ) as launcher:
        launcher.expect("command: ready")
        launcher.server().kill()
        launcher.expect("the command goes on without a cache")
        launcher.command().kill()
        assert launcher.wait() == 137
        assert sum("stand-in server: start" in line for line in launcher.lines) == 1


def test_a_killed_server_ends_the_command(tmp_path: Path, pid1: bool) -> None:
    settings = {"LMC_ON_SERVER_EXIT": "exit"}
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings=settings) as launcher:
        launcher.expect("command: ready")
        launcher.server().kill()
        assert launcher.wait() == 3
        launcher.expect_nothing_left()


@pytest.mark.parametrize("taken", ["LMC_PORT", "LMC_HTTP_PORT"])
def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path, pid1: bool, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        with Launcher(tmp_path, command("wait"), pid1=pid1, settings={taken: port}) as launcher:
            assert launcher.wait(timeout=10) == 1
            # A process outside the launcher's process namespace has no number in it.
            holder = "a process that /proc does not show" if pid1 else f"process {os.getpid()} ("
            line = launcher.expect(f"{taken}={port} is taken by {holder}")
            assert "choose another port" in line
            assert not any("stand-in server" in line for line in launcher.lines)


def test_a_stale_server_of_our_own_is_named(tmp_path: Path) -> None:
    """One that an earlier launcher left behind, say, and that answers 200 on the front end."""
    port, http_port = free_ports(2)
    argv = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    with subprocess.Popen(
        argv, env=environment(PYTHONPATH=str(STANDIN)), stderr=subprocess.PIPE, text=True
    ) as stale:
        try:
            assert stale.stderr is not None
            assert "serves" in (stale.stderr.readline(), stale.stderr.readline())[1]
            settings = {"LMC_PORT": str(port), "LMC_HTTP_PORT": str(http_port)}
            with Launcher(tmp_path, command("wait"), settings=settings) as launcher:
                assert launcher.wait(timeout=10) == 1
                for name in ("LMC_PORT", "LMC_HTTP_PORT"):
                    line = launcher.expect(f"{name}={settings[name]} is taken by process {stale.pid} (")
                    assert "lmcache.v1.multiprocess.http_server" in line
        finally:
            stale.kill()


def test_a_stranger_ends_the_start_within_two_seconds(tmp_path: Path, pid1: bool) -> None:
    """Even where the server does not heed TERM and the grace is long."""
    settings = {"XKV_STANDIN": "foreign-http ignore-term", "LMC_STOP_S": "30"}
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings=settings) as launcher:
        launcher.expect("did not start: LMC_HTTP_PORT=")
        known = time.monotonic()
        assert launcher.wait(timeout=10) == 1
        assert time.monotonic() - known < 2.0
        launcher.expect_nothing_left()


def test_a_stranger_that_answers_is_not_the_server(tmp_path: Path, pid1: bool) -> None:
    """The front end's port answers 200, but for a process that is not the server that was started."""
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings={"XKV_STANDIN": "foreign-http"}) as launcher:
        assert launcher.wait(timeout=15) == 1
        line = launcher.expect(f"LMC_HTTP_PORT={launcher.http_port} belongs to process")
        assert "not to the server that was started" in line
        assert not any("command: ready" in line for line in launcher.lines)
        launcher.expect_nothing_left()


def test_a_server_that_exits_early_ends_the_wait(tmp_path: Path, pid1: bool) -> None:
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings={"XKV_STANDIN": "fail"}) as launcher:
        assert launcher.wait(timeout=15) == 1
        line = launcher.expect("exited with code 3 before it was ready")
        assert "the drive is on fire" in line
        launcher.expect_nothing_left()


def test_a_server_that_opens_no_port_is_given_up(tmp_path: Path, pid1: bool) -> None:
    settings = {"XKV_STANDIN": "deaf", "LMC_WAIT_S": "1"}
    with Launcher(tmp_path, command("wait"), pid1=pid1, settings=settings) as launcher:
        assert launcher.wait() == 1
        launcher.expect(
            f"not ready within LMC_WAIT_S=1 seconds, waiting for the server to open LMC_PORT={launcher.port}"
        )
        launcher.expect_nothing_left()


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o644, 126)])
def test_a_command_that_cannot_run_starts_no_server(tmp_path: Path, mode: int | None, code: int) -> None:
    program = tmp_path / "program"
    if mode is not None:
        program.touch(mode)
    with Launcher(tmp_path, [str(program)]) as launcher:
        assert launcher.wait() == code
        assert not any("stand-in server" in line for line in launcher.lines)


def test_output_that_nobody_reads_does_not_stop_the_launcher(tmp_path: Path) -> None:
    with Launcher(
        tmp_path, command("wait"), read_output=False, settings={"XKV_STANDIN": "chatty"}
    ) as launcher:
        await_value(lambda: launcher.command().status() == psutil.STATUS_SLEEPING, timeout=30)
        await_value(lambda: launcher.server().status() == psutil.STATUS_SLEEPING)
        launcher.send(signal.SIGTERM)
        assert launcher.wait(ABOVE_GRACE_S) == 143
        launcher.expect_nothing_left()


def test_closed_standard_streams_are_no_harm(tmp_path: Path) -> None:
    plan = Plan(tmp_path, command("exit=6"))
    argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *plan.argv]
    done = subprocess.run(argv, env=plan.environ, cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == 6


def test_control_c_reaches_the_command_on_a_terminal(tmp_path: Path) -> None:
    """The command is the terminal's foreground group, as it would be without a launcher."""
    plan = Plan(tmp_path, command("on=SIGINT", "wait"))
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        plan.argv,
        env=plan.environ,
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (a moment, nothing locked)
    ) as process:
        os.close(terminal)
        output = b""
        try:
            while b"command: ready" not in output:
                output += os.read(controller, 4096)
            os.write(controller, b"\x03")
            while b"command: got SIGINT" not in output:
                output += os.read(controller, 4096)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=ABOVE_GRACE_S) == 143
        finally:
            process.kill()
            os.close(controller)
