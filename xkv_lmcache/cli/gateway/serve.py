"""`xkv gateway serve`: the daemon."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import click

from xkv_lmcache.cli.complaint import fail, reason, refuse_settings
from xkv_lmcache.cli.exit_codes import ExitCode
from xkv_lmcache.cli.gateway.listen import listen_addresses
from xkv_lmcache.cli.gateway.options import SettingsCommand, configure, settings_options
from xkv_lmcache.gateway_settings import SETTINGS, Configuration
from xkv_lmcache.problems import SettingProblem

if TYPE_CHECKING:
    from xkv_lmcache._native import Gateway
    from xkv_lmcache.metrics_http import MetricsServer

CLOSE_S: Final = 8.0
"""Longest time for the end: below the ten seconds that container runtimes leave before KILL."""


class ServeCommand(SettingsCommand):
    """`serve`, with every setting in its help."""

    fields = tuple(SETTINGS)


@click.command(cls=ServeCommand)
@settings_options(SETTINGS)
def serve(config: str | None, **options: str | None) -> None:
    """Open a store, or make one where its drives are blank, and serve it until TERM or INT.

    The first signal ends the sessions, finishes the commits and closes the store (exit code 0); a second one
    ends at once (128 + n; what was acknowledged is safe all the same). HUP is ignored: settings are read at the
    start alone. Exit code 1: the machine or the store refuses; 2: a setting is wrong.
    """
    Daemon(configure(config, options)).run()


class Daemon:
    """The gateway's process."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._serving = threading.Event()
        self._stop = threading.Event()
        self._gateway: Gateway | None = None

    def run(self) -> None:
        """Serve until a signal says to stop. Exits."""
        stop_signals = {
            number
            for number in (signal.SIGTERM, signal.SIGINT)
            # A background job of a shell is not meant to hear of the terminal's interrupts.
            if signal.getsignal(number) != signal.SIG_IGN
        }
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Before there is any other thread, so that all inherit it and one alone takes the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
        try:
            from xkv_lmcache import _native
        except ImportError as error:
            fail(f"the native module cannot be imported ({error}); install this package's wheel here")
        self._log = _native.log
        settings, token = self._configuration.settings, self._configuration.token
        as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
        _native.set_up_log(as_json, settings.log_level)
        for warning in self._configuration.warnings:
            self._log("warning", warning)
        try:
            listen = listen_addresses(settings.host, settings.port)
        except OSError as error:
            fail(error)
        beyond = [str(address) for address in listen if not address.is_loopback]
        if beyond and token is None:
            message = f"leads to {', '.join(beyond)}, beyond loopback, which needs a token; set token_file"
            source = SETTINGS["host"].variable
            refuse_settings([SettingProblem(source, ",".join(settings.host), message)])
        threading.Thread(target=self._take_signals, args=(stop_signals,), daemon=True).start()
        # Before the store is opened: a port that is taken is found first, and opening may take a while.
        metrics = self._serve_metrics()
        try:
            self._gateway = _native.Gateway(
                store=settings.store,
                store_gb=settings.store_gb,
                fragment_bytes=settings.wanted_fragment_bytes,
                io_engine=settings.io_engine,
                direct_io=settings.direct_io,
                depth=settings.depth,
                listen=[str(address) for address in listen],
                token=token,
                shm_dir=settings.shm_dir,
                socket_mode=settings.socket_mode,
                socket_group=settings.socket_group,
                share_drives=settings.share_drives,
                max_sessions=settings.max_sessions,
                max_slots=settings.max_slots,
                heartbeat_s=settings.heartbeat_s,
                client_silence_s=settings.client_silence_s,
            )
        except (OSError, ValueError) as error:
            fail(f"the gateway cannot start: {reason(error)}")
        self._serving.set()
        self._stop.wait()
        if metrics is not None:
            metrics.close()
        self._gateway.close(CLOSE_S)
        self._log("info", "closed")
        sys.exit(ExitCode.OK)

    def _serve_metrics(self) -> MetricsServer | None:
        settings = self._configuration.settings
        if settings.metrics_port is None:
            return None
        from xkv_lmcache.metrics import GatewayCollector
        from xkv_lmcache.metrics_http import MetricsServer, Source

        def troubles() -> list[str]:
            state = self._status()
            return (
                ["the store is not open"] if state is None else [str(reason) for reason in state["reasons"]]
            )

        source = Source(GatewayCollector(self._status), self._status, troubles)
        try:
            server = MetricsServer(settings.metrics_host, settings.metrics_port, source)
        except OSError as error:
            fail(reason(error))
        self._log("info", f"metrics on {settings.metrics_host}, port {server.port}")
        return server

    def _status(self) -> dict[str, Any] | None:
        """The gateway's state; None while it is not open."""
        text = self._gateway.status_json() if self._gateway is not None else None
        return None if text is None else dict(json.loads(text))

    def _take_signals(self, numbers: set[signal.Signals]) -> None:
        first = signal.Signals(signal.sigwait(numbers))
        if not self._serving.is_set():
            self._log("info", f"{first.name} before the store was open: nothing to finish")
            os._exit(ExitCode.OK)
        self._log("info", f"{first.name}: ending the sessions, then the store")
        self._stop.set()
        second = signal.Signals(signal.sigwait(numbers))
        self._log("warning", f"{second.name} again: ending at once")
        os._exit(128 + second)
