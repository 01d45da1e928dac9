"""The real LMCache server under a real Prometheus: series, dashboard, alert rules, and LMCache's log while a gateway is down."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.gateway import GatewayProcess
from demo.stack import Service, free_ports
from tests.e2e.test_storage import SEQUENCES, drive, server
from tests.monitoring.conftest import HTTP, ROOT, Prometheus, await_that, series

pytestmark = pytest.mark.lmcache

OBJECTS = 4 * SEQUENCES
"""What `drive` stores."""

MORE = 8
"""Sequences that are stored while there is no gateway, each in a task of its own."""

DASHBOARD = json.loads((ROOT / "monitoring" / "grafana-dashboard.json").read_text())


@dataclass
class Run:
    """LMCache's server with our plugin on a gateway, both scraped, once `drive` was done."""

    service: Service
    port: int
    http_port: int
    gateway: GatewayProcess
    prometheus: Prometheus
    stats: Path

    def metrics(self) -> dict[str, float]:
        return series(HTTP.get(f"http://127.0.0.1:{self.http_port}/metrics").text)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, prometheus: Callable[[dict[str, str]], Prometheus]
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("server")
    (metrics_port,) = free_ports(1)
    stats = folder / "stats.json"
    gateway = GatewayProcess(folder / "store", metrics_port=metrics_port, fragment_bytes=131072)
    with gateway, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMC_XKV_STATS_PATH", str(stats))
        patch.setenv("LMC_XKV_STATS_S", "1")
        patch.setenv("LMC_XKV_WAIT_S", "2")
        with server(gateway.params, folder / "server.log") as (service, port, http_port):
            targets = {"lmcache": f"127.0.0.1:{http_port}", "gateway": f"127.0.0.1:{metrics_port}"}
            scraping = prometheus(targets)
            # Rates need a sample from before.
            scraping.await_value('xkv_operation_keys_total{operation="exists"}', lambda value: value == 0)
            scraping.await_value("xkv_gateway_sessions", lambda value: value == 1)
            drive(port, http_port)
            # L1 alone, so that the second time all of it comes from us.
            assert HTTP.post(f"http://127.0.0.1:{http_port}/cache/clear").status_code == 200
            drive(port, http_port)
            scraping.await_value("sum(xkv_gateway_read_bytes_total)", lambda value: value > 0)
            yield Run(service, port, http_port, gateway, scraping, stats)


def test_our_series_are_on_the_servers_own_metrics(run: Run) -> None:
    text = HTTP.get(f"http://127.0.0.1:{run.http_port}/metrics").text
    found = series(text)
    assert found['xkv_stores_total{connector="0",outcome="stored"}'] == OBJECTS
    assert found['xkv_operation_hits_total{connector="0",operation="get"}'] >= OBJECTS
    assert found['xkv_ready{connector="0"}'] == found['xkv_session_open{connector="0"}'] == 1
    assert "lmcache_mp_" in text, "beside LMCache's own"


def test_the_statistics_file_says_the_same(run: Run) -> None:
    state = json.loads(run.stats.read_text())
    assert state["mode"] == "gateway" and state["store_stored"] == OBJECTS
    assert state["session"]["state"] == "open"


def expressions() -> list[Any]:
    found = [
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(found) > 40
    return found


@pytest.mark.parametrize("expression", expressions())
def test_a_query_of_the_dashboard_has_an_answer(expression: str, run: Run) -> None:
    found = run.prometheus.query(expression.replace("$__rate_interval", "1m"))
    assert found
    # The only quotient without a value is that of latencies nobody measured: nothing was deleted.
    assert all(not math.isnan(value) or labels == {"operation": "delete"} for labels, value in found), found


def test_the_dashboard_shows_what_was_done(run: Run) -> None:
    def value(title: str) -> float:
        (panel,) = (panel for panel in DASHBOARD["panels"] if panel["title"] == title)
        return run.prometheus.query(panel["targets"][0]["expr"])[0][1]

    assert value("Ready") == 1
    assert value("Objects") == OBJECTS
    assert value("Restored, last hour") > 2**20
    assert 0 < value("Lookups that hit, last hour") < 1


def test_the_alert_rules_are_loaded_and_quiet(run: Run, promtool: str) -> None:
    rules = ROOT / "monitoring" / "alerts.yml"
    checked = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (group,) = run.prometheus.get("rules")["groups"]
    declared = re.findall(r"- alert: (\w+)", rules.read_text())
    assert [rule["name"] for rule in group["rules"]] == declared

    def evaluated() -> list[dict[str, Any]] | None:
        (group,) = run.prometheus.get("rules")["groups"]
        return group["rules"] if all(rule["health"] == "ok" for rule in group["rules"]) else None

    assert all(rule["state"] == "inactive" for rule in await_that("an evaluation of every rule", evaluated))


def test_a_gateway_that_is_down_shows_and_floods_no_log(run: Run) -> None:
    """Last: it ends the gateway of the run."""
    mark = run.service.log.mark()
    run.gateway.end(signal.SIGKILL)
    run.prometheus.await_value("xkv_session_open", lambda value: value == 0)
    drive(run.port, run.http_port, first=100, count=MORE)
    found = run.metrics()
    assert found['xkv_ready{connector="0"}'] == 0
    refused = found['xkv_stores_total{connector="0",outcome="unreachable"}']
    assert refused >= 4 * MORE
    assert found['xkv_lookup_misses_total{cause="unreachable",connector="0"}'] > 0
    log = run.service.log.since(mark)
    ours = [line for line in log.splitlines() if "[xkv-lmcache]" in line and " INFO lookups " not in line]
    theirs = [line for line in log.splitlines() if "Store task" in line and "failed" in line]
    assert len(theirs) == 1, "LMCache's own is there once, whole"
    assert 1 <= len(ours) < 20, ours
    whole = run.service.log.since(0)
    assert whole.count("LMCache's own warnings about refused stores are kept in bounds") == 1
    alert = run.prometheus.await_value(
        'ALERTS{alertname="XkvSessionDown"}', lambda value: value == 1, timeout_s=15
    )
    assert alert == 1
