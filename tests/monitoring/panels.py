"""`make panels`: draws the dashboard's panels for the documentation.

A real Prometheus scrapes the real LMCache server with our plugin on a gateway, while LMCache's benchmark stores and loads
more than the store takes and the gateway is killed once. Every plot is made of what Prometheus answers to the panel's own
queries.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

from demo.gateway import GatewayProcess
from demo.stack import ROOT, free_ports
from tests.e2e.test_storage import drive, server
from tests.monitoring.conftest import HTTP, Prometheus, await_that

DASHBOARD = ROOT / "monitoring" / "grafana-dashboard.json"
PICTURES = ROOT / "docs" / "operators"
SHOWN = (
    "Lookups that hit",
    "Restore and store bandwidth",
    "Latency, median",
    "Latency, 99 of 100",
    "Stores by outcome",
    "Lookups that miss, by cause",
    "Store used",
    "Objects stored and evicted",
    "Session of each plugin",
    "Sessions lost",
    "Gateway: bytes",
    "Cost of the monitoring",
)
STORE_GB = 0.25
SEQUENCES = 40
"""Of each run of the benchmark, with four objects of 1 MiB each: two runs are more than the store takes."""
WINDOW = "15s"
"""What `$__rate_interval` stands for: Grafana would take four scrapes or more, too."""
STEP_S = 1


def run(folder: Path, seconds: float) -> tuple[Prometheus, float, float]:
    """Plays the run; the Prometheus that scraped it, its start and its end, Unix time."""
    (port,) = free_ports(1)
    settings: dict[str, Any] = {"store_gb": STORE_GB, "fragment_bytes": 131072, "metrics_port": port}
    with (
        GatewayProcess(folder / "store", **settings) as gateway,
        server(gateway.params, folder / "server.log") as (_, zmq_port, http_port),
    ):
        targets = {"lmcache": f"127.0.0.1:{http_port}", "gateway": f"127.0.0.1:{port}"}
        prometheus = Prometheus(folder / "prometheus", targets)
        prometheus.await_value("xkv_gateway_sessions", lambda value: value == 1)
        begun, first, killed = time.time(), 0, False
        while time.time() - begun < seconds:
            # Stored, and loaded from the store, since memory is emptied.
            drive(zmq_port, http_port, first=first, count=SEQUENCES, interval_s=0.5)
            HTTP.post(f"http://127.0.0.1:{http_port}/cache/clear").raise_for_status()
            drive(zmq_port, http_port, first=first, count=SEQUENCES, interval_s=0.5)
            first += SEQUENCES
            if not killed:
                killed = True
                gateway.end(signal.SIGKILL)
                drive(zmq_port, http_port, first=first, count=SEQUENCES // 4, interval_s=0.5)
                gateway.start()
                await_that("a session", lambda: gateway.status()["sessions"] or None)
        return prometheus, begun, time.time()


def samples(prometheus: Prometheus, expression: str, begun: float, ended: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = prometheus.get(
        "query_range",
        query=expression.replace("$__rate_interval", WINDOW),
        start=f"{begun:.3f}",
        end=f"{ended:.3f}",
        step=str(STEP_S),
    )["result"]
    return found


def legend(form: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    # Ports of this run say nothing to a reader.
    return form.replace(labels.get("instance", "\0"), labels.get("job", "")).strip()


def draw(prometheus: Prometheus, begun: float, ended: float, target: Path) -> None:
    """Writes the panels of `SHOWN` into one picture."""
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    rows = (len(SHOWN) + 1) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 2.6 * rows), layout="constrained")
    for title, plot in zip(SHOWN, axes.flat, strict=True):
        unit = panels[title]["fieldConfig"]["defaults"]["unit"]
        for query in panels[title]["targets"]:
            for found in samples(prometheus, query["expr"], begun, ended):
                points = [(float(at) - begun, float(value)) for at, value in found["values"]]
                if unit != "short" and not any(value for _, value in points):
                    continue
                name = legend(query.get("legendFormat", ""), found["metric"])
                plot.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        plot.set_title(title, fontsize=10, loc="left")
        plot.set_ylabel(
            {"cps": "per second", "Bps": "bytes/s", "percentunit": "share"}.get(unit, unit), fontsize=8
        )
        plot.set_xlim(0, ended - begun)
        plot.set_ylim(bottom=0)
        plot.tick_params(labelsize=8)
        plot.grid(alpha=0.3)
        if plot.get_legend_handles_labels()[0]:
            plot.legend(fontsize=7, loc="upper left")
    for plot in axes[-1]:
        plot.set_xlabel("seconds", fontsize=8)
    figure.savefig(target, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.monitoring.panels", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="of the run; default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        prometheus, begun, ended = run(Path(own), arguments.seconds)
        try:
            draw(prometheus, begun, ended, PICTURES / "dashboard.png")
        finally:
            prometheus.service.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
