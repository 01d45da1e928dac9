"""Prometheus series of the plugin, of the store and of the gateway.

Every series is declared once, in `PLUGIN`, `STORE` or `GATEWAY`; `docs/operators/metrics.md` is written from the
declarations (`python3 -m xkv_lmcache.metrics`). The plugin's appear on prometheus_client's default registry, hence on
the LMCache server's own `/metrics`, as soon as this module is imported; a connector is one value of the label
`connector`, the smallest number that is free. No series has a label whose values grow with keys or clients.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import REGISTRY, Collector

Labels = tuple[str, ...]
State = Mapping[str, Any]
Kind = Literal["counter", "gauge", "histogram", "info"]

MISS_CAUSES: Final = (
    "absent",
    "size",
    "not_verified",
    "io_error",
    "deadline",
    "stalled",
    "refused",
    "unreachable",
)
LOOKUP_MISS_CAUSES: Final = ("absent", "deadline", "stalled", "refused", "unreachable")
STORE_OUTCOMES: Final = (
    "stored",
    "skipped",
    "deduped",
    "dropped",
    "poisoned",
    "rejected_by_card",
    "too_old",
    "stalled",
    "deleted",
    "unreachable",
    "failed",
)
OPERATIONS: Final = ("get", "set", "exists", "delete")


class HasStats(Protocol):
    """A connector, as far as it is read here."""

    def stats_json(self) -> str:
        """Everything that is counted, as JSON text."""


@dataclass(frozen=True)
class Series:
    """One metric: its name without the suffix that its kind adds, and how its samples are read off the statistics."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[State], Iterable[tuple[Labels, Any]]]
    labels: Labels = ()

    @property
    def exposed_name(self) -> str:
        """The name that a query uses."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")

    def family(self, labels: Labels) -> Any:
        """An empty family whose labels are `labels`, then this series' own."""
        families: dict[str, Any] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
            "info": InfoMetricFamily,
        }
        return families[self.kind](self.name, self.help, labels=(*labels, *self.labels))

    def fill(self, family: Any, labels: Labels, state: State) -> None:
        """Add this series' samples of `state` to `family`."""
        for own, value in self.samples(state):
            if self.kind == "histogram":
                buckets, total = value
                family.add_metric((*labels, *own), buckets=buckets, sum_value=total)
            else:
                family.add_metric((*labels, *own), value)


def _at(*path: str) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    """The one sample at `path` in the statistics."""

    def samples(state: State) -> Iterator[tuple[Labels, Any]]:
        value: Any = state
        for name in path:
            value = value[name]
        yield (), float(value)

    return samples


def _of_session(name: str) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    """A counter of the session; 0 with an embedded store, which has none."""

    def samples(state: State) -> Iterator[tuple[Labels, Any]]:
        yield (), float((state["session"] or {}).get(name, 0))

    return samples


def _per_operation(name: str) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    return lambda state: (((each,), state["operations"][each][name]) for each in OPERATIONS)


def _counts(prefix: str, names: Labels) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    return lambda state: (((name,), state[prefix + name]) for name in names)


def _latencies(state: State) -> Iterator[tuple[Labels, Any]]:
    for operation in OPERATIONS:
        counted = state["operations"][operation]
        buckets = [(str(bound / 1e6), float(count)) for bound, count in counted["latency_us"]["buckets"]]
        buckets.append(("+Inf", float(counted["answered"])))
        yield (operation,), (buckets, counted["latency_us"]["sum"] / 1e6)


def _session_open(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), float(state["session"] is None or state["session"]["state"] == "open")


def _keys_in_progress(state: State) -> Iterator[tuple[Labels, Any]]:
    yield ("load",), state["queue"]["loads"]
    yield ("store",), state["queue"]["stores"]


def _slots(state: State) -> Iterator[tuple[Labels, Any]]:
    queue = state["queue"]
    yield ("free",), queue["slots_free"]
    yield ("used",), max(queue["slots"] - queue["slots_free"], 0)


def _plugin_info(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), {"version": state["version"], "mode": state["mode"], "namespace": state["namespace"]}


def _started(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), state["time_s"] - state["uptime_s"]


PLUGIN: Final = (
    Series("xkv", "info", "The connector's version, way to its store, and namespace.", _plugin_info),
    Series("xkv_start_time_seconds", "gauge", "When the connector was made, Unix time.", _started),
    Series(
        "xkv_ready",
        "gauge",
        "1 while the tier does its work: no load or store failed lately, the store is reached.",
        _at("health", "ready"),
    ),
    Series(
        "xkv_operations", "counter", "Operations submitted.", _per_operation("tasks"), labels=("operation",)
    ),
    Series(
        "xkv_operation_keys",
        "counter",
        "Keys of operations submitted.",
        _per_operation("keys"),
        labels=("operation",),
    ),
    Series(
        "xkv_operation_hits",
        "counter",
        "Keys that went well: loaded, written, found, gone.",
        _per_operation("hits"),
        labels=("operation",),
    ),
    Series(
        "xkv_operation_bytes",
        "counter",
        "Bytes loaded (get) and written (set).",
        _per_operation("bytes"),
        labels=("operation",),
    ),
    Series(
        "xkv_operation_seconds",
        "histogram",
        "Time from submit to answer.",
        _latencies,
        labels=("operation",),
    ),
    Series(
        "xkv_load_misses",
        "counter",
        "Keys not loaded, by cause.",
        _counts("load_miss_", MISS_CAUSES),
        labels=("cause",),
    ),
    Series(
        "xkv_lookup_misses",
        "counter",
        "Keys not found by lookups, by cause.",
        _counts("lookup_miss_", LOOKUP_MISS_CAUSES),
        labels=("cause",),
    ),
    Series(
        "xkv_stores",
        "counter",
        "Keys to be stored, by outcome.",
        _counts("store_", STORE_OUTCOMES),
        labels=("outcome",),
    ),
    Series("xkv_discarded_objects", "counter", "Objects removed by a failed load.", _at("discarded")),
    Series(
        "xkv_withheld_fragments",
        "counter",
        "Fragments read after their key had been answered; kept from LMCache's memory.",
        _at("withheld"),
    ),
    Series(
        "xkv_keys_in_progress", "gauge", "Keys being loaded and stored.", _keys_in_progress, labels=("class",)
    ),
    Series(
        "xkv_pending_store_bytes",
        "gauge",
        "Bytes of stores accepted and not answered.",
        _at("queue", "pending_store_bytes"),
    ),
    Series(
        "xkv_max_pending_store_bytes",
        "gauge",
        "The backlog from which on stores are dropped.",
        _at("queue", "max_pending_store_bytes"),
    ),
    Series(
        "xkv_undrained_answers", "gauge", "Answers that LMCache has not taken.", _at("queue", "undrained")
    ),
    Series("xkv_slots", "gauge", "Slots for fragments in flight: the ring.", _slots, labels=("state",)),
    Series(
        "xkv_slots_free_low",
        "gauge",
        "Fewest free slots seen.",
        _at("queue", "slots_free_low"),
    ),
    Series(
        "xkv_session_open",
        "gauge",
        "1 while the store is reached: a session with the gateway, or an embedded store.",
        _session_open,
    ),
    Series("xkv_sessions_opened", "counter", "Sessions with the gateway opened.", _of_session("opened")),
    Series("xkv_sessions_lost", "counter", "Sessions with the gateway lost.", _of_session("lost")),
    Series(
        "xkv_session_questions_unanswered",
        "counter",
        "Questions that ended without a session.",
        _of_session("unanswered"),
    ),
    Series(
        "xkv_session_questions_asked_again",
        "counter",
        "Questions asked again on the next session.",
        _of_session("asked_again"),
    ),
    Series(
        "xkv_reporting_cpu_seconds",
        "counter",
        "CPU time of the thread that writes the log and the statistics file.",
        _at("process", "reporting_cpu_s"),
    ),
)
"""Of each connector."""


def _per_drive(name: str) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    return lambda state: (((str(index),), float(each[name])) for index, each in enumerate(state["drives"]))


def _capacity(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), state["slots_total"] * state["fragment_bytes"]


def _never_read(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), state["never_read_slots"] * state["fragment_bytes"]


def _used(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), state["slots_used"] * state["fragment_bytes"]


STORE: Final = (
    Series("xkv_store_objects", "gauge", "Objects present.", _at("objects")),
    Series(
        "xkv_store_never_read_objects",
        "gauge",
        "Objects never read since they were written.",
        _at("never_read"),
    ),
    Series("xkv_store_never_read_bytes", "gauge", "Bytes of their slots.", _never_read),
    Series("xkv_store_used_bytes", "gauge", "Bytes of slots in use.", _used),
    Series("xkv_store_capacity_bytes", "gauge", "Bytes of all slots.", _capacity),
    Series("xkv_store_committed_objects", "counter", "Objects committed since opening.", _at("committed")),
    Series("xkv_store_evicted_objects", "counter", "Objects evicted since opening.", _at("evicted")),
    Series(
        "xkv_store_evicted_never_read_objects",
        "counter",
        "Of the evicted objects, those that were never read.",
        _at("evicted_never_read"),
    ),
    Series("xkv_store_removed_objects", "counter", "Objects removed on request.", _at("removed")),
    Series("xkv_store_discarded_objects", "counter", "Objects removed as damaged.", _at("discarded")),
    Series("xkv_store_commit_groups", "counter", "Groups of commits written.", _at("commit_groups")),
    Series("xkv_store_read_only", "gauge", "1 when its log failed: nothing is stored.", _at("read_only")),
    Series(
        "xkv_store_drive_queued_requests",
        "gauge",
        "I/Os waiting for a drive.",
        _per_drive("queued"),
        labels=("drive",),
    ),
    Series(
        "xkv_store_drive_in_flight_requests",
        "gauge",
        "I/Os given to a drive.",
        _per_drive("in_flight"),
        labels=("drive",),
    ),
    Series(
        "xkv_store_drive_oldest_request_seconds",
        "gauge",
        "Age of a drive's oldest I/O in flight.",
        _per_drive("oldest_s"),
        labels=("drive",),
    ),
)
"""Of a store, by whoever has it open: a connector with an embedded store, or a gateway."""


def _of_sessions(*names: str) -> Callable[[State], Iterator[tuple[Labels, Any]]]:
    """The sum over the open sessions."""

    def samples(state: State) -> Iterator[tuple[Labels, Any]]:
        yield (), float(sum(session[name] for session in state["sessions"] for name in names))

    return samples


def _gateway_info(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), {"store": state["store"], "generation": state["generation"]}


def _gateway_started(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), time.time() - state["uptime_s"]


def _committing(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), (state["committing_ms"] or 0) / 1e3


def _open_sessions(state: State) -> Iterator[tuple[Labels, Any]]:
    yield (), len(state["sessions"])


GATEWAY: Final = (
    Series("xkv_gateway", "info", "The store's identity and this run of the gateway.", _gateway_info),
    Series("xkv_gateway_start_time_seconds", "gauge", "When it started, Unix time.", _gateway_started),
    Series("xkv_gateway_ready", "gauge", "1 while it does its work; `/readyz` says why not.", _at("ready")),
    Series("xkv_gateway_sessions", "gauge", "Sessions open.", _open_sessions),
    Series("xkv_gateway_sessions_opened", "counter", "Sessions opened.", _at("sessions_opened")),
    Series("xkv_gateway_sessions_refused", "counter", "Sessions refused.", _at("sessions_refused")),
    Series("xkv_gateway_read_bytes", "counter", "Bytes read for sessions.", _at("bytes_read")),
    Series("xkv_gateway_written_bytes", "counter", "Bytes written for sessions.", _at("bytes_written")),
    Series("xkv_gateway_io_requests", "counter", "I/Os done.", _at("io")),
    Series("xkv_gateway_failed_reads", "counter", "Reads of fragments that failed.", _at("failed_reads")),
    Series(
        "xkv_gateway_failed_writes",
        "counter",
        "Writes, commits and removals that failed.",
        _at("failed_writes"),
    ),
    Series("xkv_gateway_rejected_objects", "counter", "Objects that found no room.", _at("rejected")),
    Series(
        "xkv_gateway_requests_in_flight", "gauge", "Requests not answered yet.", _of_sessions("in_flight")
    ),
    Series("xkv_gateway_slots_in_use", "gauge", "Slots used by requests.", _of_sessions("slots_in_use")),
    Series(
        "xkv_gateway_handles",
        "gauge",
        "Leases and transactions open.",
        _of_sessions("leases", "transactions"),
    ),
    Series("xkv_gateway_commit_seconds", "gauge", "Age of the group of commits being written.", _committing),
)
"""Of a gateway."""


def _embedded_store(state: State) -> State:
    """An embedded store's part of a connector's statistics, in the form that `STORE` reads."""
    drives = [
        {
            **drive,
            "queued": drive["queued_reads"] + drive["queued_writes"],
            "oldest_s": drive["oldest_in_flight_s"],
        }
        for drive in state["store"]["drives"]
    ]
    return {**state["store"], "drives": drives}


def _gateway_store(state: State) -> State:
    """A gateway's state in the form that `STORE` reads."""
    drives = [{**drive, "oldest_s": (drive["oldest_ms"] or 0) / 1e3} for drive in state["drives"]]
    return {**state, "drives": drives}


class Connectors(Collector):
    """The series of every connector of this process. Connectors that are dropped leave by themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connectors: weakref.WeakValueDictionary[int, HasStats] = weakref.WeakValueDictionary()
        self._cpu_s = 0.0

    def add(self, connector: HasStats) -> int:
        """Show a connector; its label."""
        with self._lock:
            index = next(index for index in range(len(self._connectors) + 1) if index not in self._connectors)
            self._connectors[index] = connector
            return index

    def remove(self, index: int) -> None:
        """Show the connector with this label no more."""
        with self._lock:
            self._connectors.pop(index, None)

    def states(self) -> dict[int, State]:
        """The statistics of every connector, by label."""
        with self._lock:
            connectors = dict(self._connectors)
        return {index: json.loads(each.stats_json()) for index, each in sorted(connectors.items())}

    def describe(self) -> Iterable[Metric]:
        """The families, without samples: what the registry keeps others from using."""
        return [family for _, family in self._families()]

    def collect(self) -> Iterable[Metric]:
        """The families with a sample for every connector."""
        begun = time.thread_time()
        states = self.states()
        families = list(self._families())
        for series, family in families:
            for index, state in states.items():
                if series not in STORE:
                    series.fill(family, (str(index),), state)
                elif state["mode"] == "embedded":
                    series.fill(family, (str(index),), _embedded_store(state))
        self._cpu_s += time.thread_time() - begun
        cost = CounterMetricFamily(
            "xkv_scrape_cpu_seconds", "CPU time of making these series.", value=self._cpu_s
        )
        return [*(family for _, family in families), cost]

    @staticmethod
    def _families() -> Iterator[tuple[Series, Any]]:
        for series in (*PLUGIN, *STORE):
            yield series, series.family(("connector",))


class GatewayCollector(Collector):
    """The series of a gateway; `status` returns its state, or None once it is closed."""

    def __init__(self, status: Callable[[], State | None]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """The families, without samples."""
        return [series.family(()) for series in (*GATEWAY, *STORE)]

    def collect(self) -> Iterable[Metric]:
        """The families with the state of now."""
        state = self._status()
        found = []
        for series in (*GATEWAY, *STORE):
            family = series.family(())
            if state is not None:
                series.fill(family, (), _gateway_store(state) if series in STORE else state)
            found.append(family)
        return found


CONNECTORS: Final = Connectors()
"""The connectors of this process."""

REGISTRY.register(CONNECTORS)


def reference() -> str:
    """The series as Markdown tables."""
    parts = []
    for title, all_series, labels in (
        ("Plugin: each connector", PLUGIN, ("connector",)),
        ("Store: a connector with an embedded one (label `connector`), or a gateway", STORE, ()),
        ("Gateway", GATEWAY, ()),
    ):
        lines = [f"## {title}", "", "| series | kind | labels | meaning |", "|---|---|---|---|"]
        for series in all_series:
            names = ", ".join(f"`{label}`" for label in (*labels, *series.labels))
            lines.append(f"| `{series.exposed_name}` | {series.kind} | {names} | {series.help} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
