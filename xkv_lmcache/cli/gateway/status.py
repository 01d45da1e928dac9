"""`xkv gateway status`: what a running gateway says of itself."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.gateway.listen import connect_host
from xkv_lmcache.cli.gateway.options import SettingsCommand, configure, settings_options
from xkv_lmcache.cli.text import byte_text, duration_text

FIELDS: Final = ("host", "port", "token_file")

INTERVAL_S: Final = 1.0
"""Time between the two samples that rates are made from."""

TIMEOUT_S: Final = 5.0

_COUNTERS: Final = ("bytes_read", "bytes_written", "committed", "evicted", "removed", "io")


class StatusCommand(SettingsCommand):
    """`status`, with the settings that say where the gateway is."""

    fields = FIELDS


@click.command(cls=StatusCommand)
@settings_options(FIELDS)
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def status(config: str | None, as_json: bool, **options: str | None) -> None:
    """Show a gateway's store, drives, usage, sessions and rates.

    Exit code 0: it answered; 1: it cannot be reached or refuses; 2: a setting is wrong.
    """
    configuration = configure(config, options, FIELDS)
    settings = configuration.settings
    from xkv_lmcache import _native

    def sample() -> tuple[float, dict[str, Any]]:
        text = _native.gateway_status(
            connect_host(settings.host), settings.port, configuration.token, TIMEOUT_S
        )
        return time.monotonic(), json.loads(text)

    try:
        before_s, before = sample()
        time.sleep(INTERVAL_S)
        now_s, state = sample()
    except (OSError, ValueError) as error:
        fail(reason(error))
    state["rates"] = rates(before, state, now_s - before_s)
    if as_json:
        click.echo(json.dumps(state, indent=2, ensure_ascii=False))
    else:
        _show(state)


def rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, float]:
    """Counters per second between two states of one gateway; zero where it was restarted in between."""
    same = before["generation"] == after["generation"]
    return {f"{name}_per_s": (after[name] - before[name]) / seconds if same else 0.0 for name in _COUNTERS}


def _show(state: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    used, total = state["slots_used"], state["slots_total"]
    size = state["fragment_bytes"]
    console.print(f"store      {state['store']}, up {duration_text(state['uptime_s'])}")
    console.print(
        f"usage      {byte_text(used * size)} of {byte_text(total * size)} ({100 * used / total:.1f} %), "
        f"{state['objects']} objects in fragments of {size} bytes"
    )
    if state["read_only"]:
        console.print("READ-ONLY  the manifest log failed; the gateway's log says why")
    per_s = state["rates"]
    console.print(
        f"rates      {byte_text(per_s['bytes_read_per_s'])}/s read, "
        f"{byte_text(per_s['bytes_written_per_s'])}/s written, {per_s['committed_per_s']:.0f} objects/s stored, "
        f"{per_s['evicted_per_s']:.0f}/s evicted, {per_s['io_per_s']:.0f} I/Os/s"
    )
    drives = Table("drive", "size", "used", "I/O", "queued", "in flight", "oldest", box=None, pad_edge=False)
    for drive in state["drives"]:
        oldest = drive["oldest_ms"]
        drives.add_row(
            drive["name"],
            byte_text(drive["bytes"]),
            f"{100 * drive['slots_used'] / drive['slots_total']:.1f} %",
            f"{drive['engine']}, {'direct' if drive['direct'] else 'buffered'}",
            str(drive["queued"]),
            str(drive["in_flight"]),
            "-" if oldest is None else f"{oldest} ms",
        )
    console.print(drives)
    console.print(
        f"sessions   {len(state['sessions'])} open, {state['sessions_opened']} opened, "
        f"{state['sessions_refused']} refused since the start"
    )
    if state["sessions"]:
        sessions = Table(
            "session", "client", "address", "age", "loads", "slots", "in flight", "leases", "stores", "read", "written",
            box=None, pad_edge=False,
        )  # fmt: skip
        for session in state["sessions"]:
            sessions.add_row(
                str(session["number"]),
                session["client"],
                session["address"],
                duration_text(session["age_s"]),
                "straight" if session["straight"] else "ring",
                f"{session['slots_in_use']}/{session['slots']}",
                str(session["in_flight"]),
                str(session["leases"]),
                str(session["transactions"]),
                byte_text(session["bytes_read"]),
                byte_text(session["bytes_written"]),
            )
        console.print(sessions)
