"""The supervisor: LMCache's server and the main command as children, ended together.

It behaves like a good PID 1: it forwards signals, reaps whatever ends, gives a grace, then kills what is
its own, and exits with the command's code. One thread does everything, so that a child can be started at
any moment.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final, Self

import psutil

from xkv_lmcache_autostart import log, machine, processes
from xkv_lmcache_autostart.exit_codes import ExitCode, of_signal, of_wait_status
from xkv_lmcache_autostart.output import Relay
from xkv_lmcache_autostart.processes import Child
from xkv_lmcache_autostart.readiness import ChildProbe, NotReady, wait_for
from xkv_lmcache_autostart.settings import Settings
from xkv_lmcache_autostart.watchdog import Watchdog

RECOVERS_SINCE: Final = (0, 5, 6)
"""The LMCache whose vLLM side looks up again after the server was restarted."""

RESTART_LIMIT: Final = 10
"""Failures in a row after which the server is not restarted any more."""

_SETTLED_S: Final = 60.0
"""A server that was ready for this long starts a new row of failures when it dies."""

_LONGEST_BACKOFF_S: Final = 60.0
_SERVER_SHARE_S: Final = 3.0
"""The part of the grace that is kept for the server to close the store, at most three tenths of it."""

_FAILED_START_S: Final = 1.0
"""The grace of a server that never served: it has nothing to finish."""

_SECOND_SIGNAL_S: Final = 0.5
"""Signals closer together than this are one request to stop (a terminal and its shell may both send one)."""

_POLL_S: Final = 0.1
_KILL_S: Final = 5.0
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class _Interrupted(Exception):
    """A wait is over because the command has ended or everything is to stop."""


class _Signals:
    """Collects signals; its descriptor becomes readable when there is one."""

    def __init__(self) -> None:
        self.arrived: deque[int] = deque()
        self._reader, self._writer = socket.socketpair()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGCHLD):
            # What was ignored from the start, as by nohup, stays so.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(
                    number, lambda arrived, _frame: self.arrived.append(arrived)
                )
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def clear(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass


class Supervisor:
    """Runs the server and the command. `run` returns the launcher's exit code."""

    def __init__(
        self,
        settings: Settings,
        server_argv: Sequence[str],
        server_environ: Mapping[str, str],
        command_argv: Sequence[str],
        command_environ: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._server_argv = server_argv
        self._command_argv = command_argv
        self._mark = processes.new_mark()
        self._server_environ = {**server_environ, processes.MARK: self._mark}
        self._command_environ = {**command_environ, processes.MARK: self._mark}
        self._log = log.get()
        self._signals = _Signals()
        self._relays: list[Relay] = []
        self._server: Child | None = None
        self._ready_at: float | None = None
        self._failures = 0
        self._command: Child | None = None
        self._stop_signal: int | None = None
        self._stop_at = 0.0
        self._grace_s = settings.stop_s
        self._hurry = False
        self._server_lost = False

    def run(self) -> int:
        processes.become_subreaper()
        self._watchdog = Watchdog(self._settings.stop_s, self._mark)
        with self._signals:
            code: int = ExitCode.OK
            try:
                self._start_server()
                self._start_command()
                self._serve()
            except NotReady as error:
                self._log.error(f"the LMCache server did not start: {error}")
                code = ExitCode.START_FAILED
                self._grace_s = min(self._grace_s, _FAILED_START_S)
            except OSError as error:
                self._log.error(f"the command cannot be executed: {error}")
                code = ExitCode.NOT_FOUND if isinstance(error, FileNotFoundError) else ExitCode.NOT_EXECUTABLE
            except _Interrupted:
                pass
            self._end()
            self._watchdog.close()
        if code != ExitCode.OK:
            return code
        if self._server_lost:
            return ExitCode.SERVER_LOST
        if self._command is not None and self._command.exit_code is not None:
            return of_wait_status(self._command.exit_code)
        return of_signal(self._stop_signal or signal.SIGKILL)

    # Starting

    def _start_server(self) -> None:
        """Start the server and wait until it is ready. Raises `NotReady` or `_Interrupted`."""
        started = time.monotonic()
        try:
            server = processes.spawn("LMCache server", self._server_argv, self._server_environ, relay=True)
        except OSError as error:
            raise NotReady(f"{self._server_argv[0]} cannot be executed: {error.strerror}") from error
        self._watchdog.watch(server.pid)
        self._server = server
        self._ready_at = None
        self._relays += server.relays
        self._log.info("the LMCache server is starting", pid=server.pid)
        probe = ChildProbe(server.pid, self._settings)
        if not wait_for(probe.look, self._settings.wait_s, self._sleep_while_starting):
            raise NotReady(
                f"it was not ready within LMC_WAIT_S={self._settings.wait_s:g} seconds, waiting for "
                f"{probe.waiting_for}{_quoted(server)}"
            )
        self._ready_at = time.monotonic()
        note = "" if probe.proven else " (/proc does not show whose ports these are; it answers and lives)"
        self._log.info(
            f"the LMCache server is ready{note}",
            pid=server.pid,
            port=self._settings.port,
            http_port=self._settings.http_port,
            after_s=round(self._ready_at - started, 1),
        )

    def _start_command(self) -> None:
        self._command = processes.spawn("command", self._command_argv, self._command_environ, foreground=True)
        self._watchdog.watch(self._command.pid)
        self._log.info("the command is started", pid=self._command.pid, program=self._command_argv[0])

    def _sleep_while_starting(self, seconds: float) -> None:
        self._sleep(seconds)
        if self._server is not None and not self._server.running:
            self._drain()
            raise NotReady(f"it {_ending(self._server)} before it was ready{_quoted(self._server)}")

    # Serving

    def _serve(self) -> None:
        """Return when the command has ended, or raise `_Interrupted` when everything is to stop."""
        while True:
            self._sleep(3600.0, wake=lambda: self._server is not None and not self._server.running)
            if self._server is not None and not self._server.running:
                self._server_died(self._server)

    def _server_died(self, server: Child) -> None:
        self._bury(server)
        policy = self._settings.on_server_exit
        what = f"the LMCache server {_ending(server)} under the command"
        if policy == "exit":
            self._log.error(f"{what}; LMC_ON_SERVER_EXIT=exit: the command is stopped")
            self._server_lost = True
            self._stop(signal.SIGTERM)
            if self._command is not None:
                self._command.send(signal.SIGTERM)
            raise _Interrupted
        if policy == "ignore":
            self._log.error(f"{what}; LMC_ON_SERVER_EXIT=ignore: the command goes on without a cache")
            return
        if self._ready_at is not None and time.monotonic() - self._ready_at > _SETTLED_S:
            self._failures = 0
        self._log.error(f"{what}; it is restarted. {self._cost_of_outage()}")
        self._restart()

    def _restart(self) -> None:
        """Start the server again, with growing pauses, until it is ready or has failed too often."""
        while self._failures < RESTART_LIMIT:
            self._sleep(min(_LONGEST_BACKOFF_S, 2.0**self._failures))
            self._failures += 1
            try:
                self._start_server()
            except NotReady as error:
                self._log.error(f"the LMCache server did not start again: {error}", failures=self._failures)
                if self._server is not None:
                    self._bury(self._server)
                continue
            self._log.warning(f"the LMCache server is back, with an empty L1. {self._cost_of_outage()}")
            return
        self._log.error(
            "the LMCache server is not restarted any more; the command goes on without a cache",
            failures=self._failures,
        )

    def _cost_of_outage(self) -> str:
        """What vLLM loses when requests come while the server is away."""
        version = machine.lmcache_version()
        if version is not None and version >= RECOVERS_SINCE:
            return "vLLM goes on and uses it again by itself"
        return (
            "vLLM goes on, but A REQUEST THAT MEETS THE OUTAGE ENDS ALL CACHE HITS UNTIL vLLM ITSELF IS "
            "RESTARTED (LMCache before 0.5.6 never looks up again)"
        )

    def _bury(self, server: Child) -> None:
        """Kill what is left of a server and its process group, and forget it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        while server.running and time.monotonic() < deadline:
            self._step(_POLL_S)
        self._drain()
        for relay in server.relays:
            relay.close()
        self._watchdog.forget(server.pid)
        self._server = None

    # Ending

    def _stop(self, number: int) -> None:
        """Note that everything is to stop; the grace runs from the first request on."""
        now = time.monotonic()
        if self._stop_signal is None:
            self._stop_signal, self._stop_at = number, now
            self._log.info(f"stopping on {signal.Signals(number).name}", grace_s=self._settings.stop_s)
        elif now - self._stop_at >= _SECOND_SIGNAL_S and not self._hurry:
            self._hurry = True
            self._log.warning(f"a second {signal.Signals(number).name}: the grace is over")

    def _end(self) -> None:
        """End everything of ours: the command first, then the server, for which part of the grace is kept.

        What outlives the grace is killed, descendants that nobody waits for included.
        """
        grace = self._grace_s
        deadline = (self._stop_at if self._stop_signal is not None else time.monotonic()) + grace
        server_from = deadline - min(_SERVER_SHARE_S, grace * 0.3)
        while self._command is not None and self._command.running and self._time_left(server_from):
            self._step(_POLL_S)
        if self._command is not None and not self._command.running:
            processes.give_terminal(os.getpgrp())
        if self._server is not None:
            self._server.send(signal.SIGTERM)
        terminate = processes.once(lambda process: processes.send(process, signal.SIGTERM))
        while not self._all_ended(left := self._ours()) and self._time_left(deadline):
            spared = self._families()
            terminate(process for process in left if process.pid not in spared)
            self._step(_POLL_S)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            self._log.warning("killing what did not end in time", pids=pids)
        deadline = time.monotonic() + _KILL_S
        while not self._all_ended(left := self._ours()) and time.monotonic() < deadline:
            for process in left:
                processes.send(process, signal.SIGKILL)
            self._step(_POLL_S)
        self._drain()

    def _time_left(self, deadline: float) -> bool:
        return not self._hurry and time.monotonic() < deadline

    def _all_ended(self, left: list[psutil.Process]) -> bool:
        return not left and not any(
            child is not None and child.running for child in (self._server, self._command)
        )

    def _ours(self) -> list[psutil.Process]:
        self._reap()
        return [found for found in processes.descendants() if found.pid != self._watchdog.pid]

    def _families(self) -> set[int]:
        """Children that still run, with their descendants: these are theirs to end."""
        pids: set[int] = set()
        for child in (self._server, self._command):
            if child is not None and child.running:
                pids |= {child.pid, *(process.pid for process in processes.descendants(child.pid))}
        return pids

    # Waiting

    def _sleep(self, seconds: float, wake: Callable[[], bool] = lambda: False) -> None:
        """Wait until the time is over or `wake` is true. Raises `_Interrupted` when there is an end to
        make.
        """
        deadline = time.monotonic() + seconds
        while not wake():
            if self._stop_signal is not None or (self._command is not None and not self._command.running):
                raise _Interrupted
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._step(left)

    def _step(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for something to happen, and take note of what did."""
        self._pass_on(0.0 if self._signals.arrived else timeout)
        self._reap()
        while self._signals.arrived:
            self._take(self._signals.arrived.popleft())

    def _pass_on(self, timeout: float) -> bool:
        """Wait for a signal or for output, and pass the output on. Whether there was output."""
        self._relays = [relay for relay in self._relays if relay.open or relay.wants_write()]
        actions: dict[int, Callable[[], None]] = {}
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        for relay in self._relays:
            if relay.wants_read():
                poller.register(relay.source, select.POLLIN)
                actions[relay.source] = relay.read
            if relay.wants_write():
                poller.register(relay.target, select.POLLOUT)
                actions.setdefault(relay.target, relay.write)
        found = [descriptor for descriptor, _ in poller.poll(timeout * 1000)]
        self._signals.clear()
        for descriptor in found:
            if descriptor in actions:
                actions[descriptor]()
        return any(descriptor in actions for descriptor in found)

    def _take(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        command_runs = self._command is not None and self._command.running
        if self._command is not None and command_runs:
            self._command.send(number)
        if number in (signal.SIGTERM, signal.SIGINT) or (number == signal.SIGHUP and not command_runs):
            self._stop(number)

    def _reap(self) -> None:
        for pid, exit_code in processes.reap():
            if pid == self._watchdog.pid:
                self._watchdog.restart()
                self._log.warning("the watchdog died and is replaced", exit_code=exit_code)
            for child in (self._server, self._command):
                if child is not None and child.pid == pid:
                    child.reaped(exit_code)

    def _drain(self) -> None:
        """Pass on what the children have written and what the outputs take, for a second at most."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self._pass_on(0.0):
            pass


def _ending(child: Child) -> str:
    code = child.exit_code or 0
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _quoted(child: Child) -> str:
    """The child's last lines, as an appendix to a message."""
    if not child.tail:
        return "; it has written nothing"
    return "; its last lines:\n" + "\n".join(f"  | {line}" for line in child.tail)
