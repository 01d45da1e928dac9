"""`xkv top`: plugins and gateways as they work, in a terminal."""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.gateway.listen import connect_host
from xkv_lmcache.cli.gateway.options import SettingsCommand, configure, settings_options
from xkv_lmcache.cli.gateway.status import FIELDS, TIMEOUT_S
from xkv_lmcache.cli.text import byte_text, duration_text, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Mapping[str, Any]

PLUGIN_BYTES: Final = (("in", "get"), ("out", "set"))

TROUBLES: Final = (
    ("store_dropped", "stores dropped: the backlog was full"),
    ("store_poisoned", "stores refused: unfilled buffers of failed loads"),
    ("store_rejected_by_card", "stores refused: no room"),
    ("store_too_old", "stores refused: too old"),
    ("store_stalled", "stores refused: a drive does not answer"),
    ("store_unreachable", "stores refused: no gateway"),
    ("store_failed", "stores failed"),
    ("load_miss_not_verified", "loads not verified: damaged objects, removed"),
    ("load_miss_size", "loads of another size, removed"),
    ("load_miss_io_error", "loads with I/O errors, removed"),
    ("load_miss_deadline", "loads past their deadline"),
    ("load_miss_stalled", "loads from drives that do not answer"),
    ("load_miss_unreachable", "loads without a gateway"),
    ("lookup_miss_unreachable", "lookups without a gateway"),
    ("lookup_miss_stalled", "lookups of drives that do not answer"),
    ("lookup_miss_deadline", "lookups past their deadline"),
    ("withheld", "fragments that came too late, withheld"),
)
"""Counters that stay at 0 in ordinary running, and what they mean."""


@dataclass(frozen=True)
class Sample:
    """A state, when it was read (monotonic seconds), or why it could not be."""

    at_s: float
    state: State | None
    error: str = ""


@dataclass
class Source:
    """A plugin or a gateway: its name and how its state is read, with the two latest samples."""

    name: str
    kind: str
    read: Callable[[], State]
    before: Sample | None = None
    now: Sample | None = None

    def sample(self) -> None:
        """Read the state."""
        try:
            found = Sample(time.monotonic(), self.read())
        except (OSError, ValueError) as error:
            # A file that is gone, a gateway that is down: shown, and looked at again.
            found = Sample(time.monotonic(), None, reason(error))
        if found.state is None or self.now is None or self.now.state is None or self._is_newer(found.state):
            self.before = self.now if self.now is not None and self.now.state is not None else self.before
            self.now = found

    def _is_newer(self, state: State) -> bool:
        assert self.now is not None and self.now.state is not None
        # The file is written less often than it is read.
        return self.kind == "gateway" or state["time_s"] != self.now.state["time_s"]

    def per_second(self, counter: Callable[[State], float]) -> float | None:
        """How fast a counter grew between the two samples; None where there is one, or a restart in between."""
        if self.now is None or self.before is None or self.now.state is None or self.before.state is None:
            return None
        new, old = self.now.state, self.before.state
        seconds = new["uptime_s"] - old["uptime_s"]
        grown = counter(new) - counter(old)
        return grown / seconds if seconds > 0 and grown >= 0 else None


class TopCommand(SettingsCommand):
    """`top`, with the settings that say where a gateway is."""

    fields = FIELDS


@click.command(cls=TopCommand)
@click.option(
    "--stats", "files", metavar="FILE", multiple=True, help="Statistics file of a plugin (stats_path)."
)
@click.option("--url", "urls", metavar="URL", multiple=True, help="Metrics port of a plugin or gateway.")
@click.option(
    "--interval", "interval_s", metavar="SECONDS", default=2.0, show_default=True, help="Between looks."
)
@click.option("--once", is_flag=True, help="Print one view and end.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the states as JSON, one object a line; with --once, one."
)
@settings_options(FIELDS)
def top(
    files: tuple[str, ...],
    urls: tuple[str, ...],
    interval_s: float,
    once: bool,
    as_json: bool,
    config: str | None,
    **options: str | None,
) -> None:
    """Watch plugins and gateways: hits, rates, latencies, backlog, capacity, sessions, and what is wrong.

    A gateway is asked at --host and --port, also when no --stats or --url is given. Ends with Ctrl-C. Exit code with
    --once: 0 when everything answered and is ready, 1 otherwise; 2: a setting is wrong.
    """
    if interval_s <= 0:
        raise click.BadParameter("must be above 0", param_hint="--interval")
    sources = [_file(path) for path in files]
    sources += [source for url in urls for source in _url(url)]
    if not sources or any(options[field] is not None for field in ("host", "port")):
        sources.append(_gateway(config, options))
    try:
        if once:
            _once(sources, interval_s, as_json)
        elif as_json:
            while True:
                _sample(sources)
                click.echo(_json(sources))
                time.sleep(interval_s)
        else:
            _watch(sources, interval_s)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _once(sources: list[Source], interval_s: float, as_json: bool) -> None:
    _sample(sources)
    if not as_json and any(source.kind == "gateway" for source in sources):
        # Rates need two looks.
        time.sleep(min(interval_s, 1.0))
        _sample(sources)
    if as_json:
        click.echo(_json(sources, indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 120
        console.print(view(sources))
    sys.exit(0 if all(_is_ready(source) for source in sources) else 1)


def _watch(sources: list[Source], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        fail("standard output is no terminal; add --once or --json")
    _sample(sources)
    with Live(view(sources), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            _sample(sources)
            live.update(view(sources), refresh=True)


def _sample(sources: Iterable[Source]) -> None:
    for source in sources:
        source.sample()


def _json(sources: Iterable[Source], indent: int | None = None) -> str:
    found = [
        {"name": source.name, "kind": source.kind, "state": source.now.state, "error": source.now.error}
        for source in sources
        if source.now is not None
    ]
    return json.dumps({"sources": found}, indent=indent, ensure_ascii=False)


def _file(path: str) -> Source:
    def read() -> State:
        with open(path, encoding="utf-8") as file:
            state: State = json.load(file)
        if not isinstance(state, dict) or "operations" not in state:
            raise ValueError("not a statistics file; name the one of stats_path")
        return state

    return Source(path, "plugin", read)


def _fetch(url: str) -> State:
    with urllib.request.urlopen(url.rstrip("/") + "/status", timeout=TIMEOUT_S) as answer:
        state: State = json.load(answer)
    return state


def _url(url: str) -> list[Source]:
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} is no URL; write http://HOST:PORT", param_hint="--url")
    try:
        state = _fetch(url)
    except (OSError, ValueError) as error:
        fail(f"{url}: {reason(error)}; is metrics_port set there?")
    if "connectors" not in state:
        return [Source(url, "gateway", lambda: _fetch(url))]

    def of(index: str) -> Callable[[], State]:
        def read() -> State:
            connectors: Mapping[str, State] = _fetch(url)["connectors"]
            if index not in connectors:
                raise ValueError(f"connector {index} is closed")
            return connectors[index]

        return read

    return [Source(f"{url} connector {index}", "plugin", of(index)) for index in state["connectors"]]


def _gateway(config: str | None, options: Mapping[str, str | None]) -> Source:
    configuration = configure(config, dict(options), FIELDS)
    settings = configuration.settings
    from xkv_lmcache import _native

    host = connect_host(settings.host)

    def read() -> State:
        text = _native.gateway_status(host, settings.port, configuration.token, TIMEOUT_S)
        state: State = json.loads(text)
        return state

    return Source(f"{host}:{settings.port}", "gateway", read)


def _is_ready(source: Source) -> bool:
    state = source.now.state if source.now is not None else None
    if state is None:
        return False
    return bool(state["ready"] if source.kind == "gateway" else state["health"]["ready"])


def view(sources: Iterable[Source]) -> RenderableType:
    """Everything about the sources, to be printed."""
    from rich.console import Group

    return Group(*(_panel(source) for source in sources))


def _panel(source: Source) -> RenderableType:
    from rich.panel import Panel
    from rich.text import Text

    sample = source.now
    if sample is None or sample.state is None:
        error = sample.error if sample is not None else "not read yet"
        return Panel(
            Text(error), title=f"{source.kind} {source.name}", border_style="red", title_align="left"
        )
    body = _plugin(source, sample.state) if source.kind == "plugin" else _gateway_body(source, sample.state)
    ready = _is_ready(source)
    state = "ready" if ready else "NOT READY"
    return Panel(
        body,
        title=Text(f"{source.kind} {source.name}: {state}"),
        border_style="green" if ready else "red",
        title_align="left",
    )


def _lines(*rows: tuple[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _rate(per_second: float | None, unit: Callable[[float], str]) -> str:
    return "-" if per_second is None else f"{unit(per_second)}/s"


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.1f} s"


def _bytes_of(operation: str) -> Callable[[State], float]:
    def counter(state: State) -> float:
        return float(state["operations"][operation]["bytes"])

    return counter


def _plugin(source: Source, state: State) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    operations, queue = state["operations"], state["queue"]
    look, get, put = operations["exists"], operations["get"], operations["set"]
    age = time.time() - state["time_s"]
    rates = {name: _rate(source.per_second(_bytes_of(each)), byte_text) for name, each in PLUGIN_BYTES}
    latency = ", ".join(
        f"{name} {_milliseconds(operations[name]['latency_us']['p50'])} / "
        f"{_milliseconds(operations[name]['latency_us']['p99'])}"
        for name in ("get", "set", "exists")
    )
    used = max(queue["slots"] - queue["slots_free"], 0)
    rows = [
        (
            "age",
            (
                f"{age:.0f} s; up {duration_text(state['uptime_s'])}, {state['mode']}, "
                f"namespace {state['namespace']!r}"
            ),
        ),
        ("lookups", f"{look['hits']} of {look['keys']} hit ({share_text(look['hits'], look['keys'])})"),
        (
            "loads",
            (
                f"{get['hits']} of {get['keys']} ({share_text(get['hits'], get['keys'])}), "
                f"{byte_text(get['bytes'])} in, {rates['in']}"
            ),
        ),
        (
            "stores",
            (
                f"{state['store_stored']} stored, {state['store_skipped']} skipped, {state['store_deduped']} deduped, "
                f"{byte_text(put['bytes'])} out, {rates['out']}"
            ),
        ),
        ("latency", f"{latency} (p50 / p99)"),
        (
            "queue",
            (
                f"{queue['loads']} loads, {queue['stores']} stores; backlog "
                f"{byte_text(queue['pending_store_bytes'])} of {byte_text(queue['max_pending_store_bytes'])}; "
                f"slots {used} of {queue['slots']} used"
            ),
        ),
    ]
    if state["mode"] == "embedded":
        rows.append(("store", _store_text(state["store"])))
    else:
        session = state["session"]
        rows.append(
            (
                "session",
                (
                    f"{session['state']} for {duration_text(session['for_s'])} with {session['gateway']}; "
                    f"{session['opened']} opened, {session['lost']} lost"
                ),
            )
        )
    process = state["process"]
    rows.append(
        (
            "process",
            f"{process['pid']}: {byte_text(process['rss_bytes'])}, {process['cpu_s']:.1f} s CPU",
        )
    )
    wrong = [
        *state["health"]["reasons"],
        *(f"{state[name]} {text}" for name, text in TROUBLES if state[name]),
    ]
    return Group(_lines(*rows), *(Text(f"! {line}", style="red") for line in wrong))


def _store_text(store: State) -> str:
    size = store["fragment_bytes"]
    return (
        f"{byte_text(store['slots_used'] * size)} of {byte_text(store['slots_total'] * size)} "
        f"({share_text(store['slots_used'], store['slots_total'])}), {store['objects']} objects; "
        f"{store['evicted']} evicted, {store['discarded']} discarded; "
        f"{share_text(store['never_read_slots'], store['slots_used'])} never read"
    )


def _gateway_body(source: Source, state: State) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def per_second(name: str, unit: Callable[[float], str]) -> str:
        return _rate(source.per_second(lambda each: each[name]), unit)

    def plain(value: float) -> str:
        return f"{value:.0f}"

    rows = [
        ("store", f"{state['store']}, up {duration_text(state['uptime_s'])}"),
        ("usage", _store_text(state)),
        (
            "rates",
            (
                f"{per_second('bytes_read', byte_text)} read, {per_second('bytes_written', byte_text)} written, "
                f"{per_second('committed', plain)} stored, {per_second('evicted', plain)} evicted, "
                f"{per_second('io', plain)} I/Os"
            ),
        ),
        (
            "sessions",
            (
                f"{len(state['sessions'])} open, {state['sessions_opened']} opened, "
                f"{state['sessions_refused']} refused"
            ),
        ),
    ]
    parts: list[RenderableType] = [_lines(*rows)]
    drives = Table("drive", "used", "queued", "in flight", "oldest", box=None, pad_edge=False)
    for drive in state["drives"]:
        oldest = drive["oldest_ms"]
        drives.add_row(
            drive["name"],
            share_text(drive["slots_used"], drive["slots_total"]),
            str(drive["queued"]),
            str(drive["in_flight"]),
            "-" if oldest is None else f"{oldest} ms",
        )
    parts.append(drives)
    if state["sessions"]:
        sessions = Table(
            "session", "client", "age", "slots", "in flight", "read", "written", box=None, pad_edge=False
        )
        for each in state["sessions"]:
            sessions.add_row(
                str(each["number"]),
                each["client"],
                duration_text(each["age_s"]),
                f"{each['slots_in_use']}/{each['slots']}",
                str(each["in_flight"]),
                byte_text(each["bytes_read"]),
                byte_text(each["bytes_written"]),
            )
        parts.append(sessions)
    wrong = list(state["reasons"])
    wrong += [
        f"{state[name]} {text}"
        for name, text in (
            ("failed_reads", "reads failed"),
            ("failed_writes", "writes or commits failed"),
            ("rejected", "objects found no room"),
            ("discarded", "objects discarded as damaged"),
        )
        if state[name]
    ]
    parts += [Text(f"! {line}", style="red") for line in wrong]
    return Group(*parts)
