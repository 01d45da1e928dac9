"""The series: all there from the start, each under one name, one label for a connector, no trace of keys or clients."""

import gc
import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from demo.gateway import GatewayProcess
from demo.stack import free_ports
from tests.backends import Backend
from tests.monitoring.conftest import HTTP, ROOT, await_that, series
from tests.plugin.client import Client, contents
from xkv_lmcache.metrics import GATEWAY, PLUGIN, STORE, reference

SIZE = 10_000


def exposed(declared: tuple[object, ...], text: str) -> None:
    found = {family.name for family in text_string_to_metric_families(text) if family.samples}
    assert {each.name for each in declared if each.kind != "info"} <= found  # type: ignore[attr-defined]


def test_all_series_exist_before_anything_happens(backend: Backend, tmp_path: Path, promtool: str) -> None:
    params = backend.params(tmp_path / "store", store_gb=0.1)
    with Client(**params):
        text = generate_latest(REGISTRY).decode()
    exposed(PLUGIN + STORE if backend.kind == "embedded" else PLUGIN, text)
    ours = "".join(line + "\n" for line in text.splitlines() if re.match(r"(# \w+ )?xkv_", line))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=ours, capture_output=True, text=True, check=False
    )
    # It asks for names in units of their base alone; everything else that it says is a fault.
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_connector_is_one_value_of_a_label_that_is_used_again(tmp_path: Path) -> None:
    def hits() -> dict[str, float]:
        found = series(generate_latest(REGISTRY).decode(), "xkv_operation_hits_total")
        return {name: value for name, value in found.items() if 'operation="get"' in name}

    def label(index: int) -> str:
        return f'xkv_operation_hits_total{{connector="{index}",operation="get"}}'

    gc.collect()
    assert hits() == {}
    objects = {"key": contents(1, SIZE)}
    with Client(store=str(tmp_path / "0"), store_gb=0.1) as first:
        with Client(store=str(tmp_path / "1"), store_gb=0.1) as second:
            assert second.set(objects) and second.get({"key": SIZE}) == objects
            assert hits() == {label(0): 0, label(1): 1}
            first.connector.close()
            first.connector.close()
            assert hits() == {label(1): 1}
            with Client(store=str(tmp_path / "2"), store_gb=0.1):
                assert hits() == {label(0): 0, label(1): 1}
        assert hits() == {}
    with Client(store=str(tmp_path / "0"), store_gb=0.1) as dropped:
        assert hits() == {label(0): 0}
        connector = dropped.connector
        dropped.connector = None  # type: ignore[assignment]
        del connector
        gc.collect()
        assert hits() == {}, "a connector that nobody has leaves by itself"
        dropped.connector = Client(store=str(tmp_path / "3"), store_gb=0.1).connector


def test_nothing_of_a_key_or_client_becomes_a_label(tmp_path: Path) -> None:
    with Client(store=str(tmp_path / "0"), store_gb=0.1, namespace="the namespace") as client:
        before = len(series(generate_latest(REGISTRY).decode()))
        assert client.set({f"secret model {i}": contents(i, 100) for i in range(100)})
        client.get({f"secret other {i}": 100 for i in range(100)})
        text = generate_latest(REGISTRY).decode()
        assert "secret" not in text and len(series(text)) == before
        assert 'namespace="the namespace"' in text


def test_the_gateway_counts_on_its_own_port(tmp_path: Path, promtool: str) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with GatewayProcess(tmp_path / "store", metrics_port=port) as gateway:
        exposed(GATEWAY + STORE, await_that("the port", lambda: answer(f"{url}/metrics")))
        objects = {f"key {i}": contents(i, SIZE) for i in range(10)}
        with Client(**gateway.params) as client:
            assert client.set(objects) and client.get(dict.fromkeys(objects, SIZE)) == objects
            text = HTTP.get(f"{url}/metrics").text
            found = series(text)
            assert (found["xkv_store_objects"], found["xkv_gateway_sessions"]) == (10, 1)
            assert found["xkv_gateway_written_bytes_total"] >= 10 * SIZE
            assert found["xkv_gateway_read_bytes_total"] >= 10 * SIZE
            assert "key 1" not in text and str(client.connector.stats()["process"]["pid"]) not in text
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr
        state = HTTP.get(f"{url}/status").json()
        assert state["objects"] == 10 and state["ready"]
        assert HTTP.get(f"{url}/").status_code == 404
        assert gateway.end() == 0


def answer(url: str) -> str | None:
    try:
        return HTTP.get(url).text
    except httpx.HTTPError:
        return None


def test_a_port_that_is_taken_is_named_and_opens_no_store(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with GatewayProcess(tmp_path / "other", metrics_port=port):
        message = (
            f"metrics_port={port} on 127.0.0.1 cannot be listened on (Address already in use); choose another"
        )
        with pytest.raises(OSError, match=re.escape(message)):
            Client(store=str(tmp_path / "store"), store_gb=0.1, metrics_port=port)
        assert not (tmp_path / "store").exists()


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "operators" / "metrics.md").read_text()
    assert page.endswith(reference()), "write it again: python3 -m xkv_lmcache.metrics"


def test_the_metrics_take_below_one_percent_of_the_process(tmp_path: Path) -> None:
    """Under full load, with Prometheus' usual period and ours: CPU time of both paths, by the thread clock."""
    reports_every_s, scrapes_every_s = 30, 15
    with Client(store=str(tmp_path / "store"), store_gb=0.1, stats_interval_s=0.02) as client:
        objects = {f"key {i}": contents(i, 200_000) for i in range(50)}
        assert client.set(objects)
        begun, before = time.monotonic(), client.connector.stats()["process"]
        while time.monotonic() - begun < 3:
            assert client.get(dict.fromkeys(objects, 200_000)) == objects
        elapsed, after = time.monotonic() - begun, client.connector.stats()["process"]
        load = (after["cpu_s"] - before["cpu_s"]) / elapsed
        report = (after["reporting_cpu_s"] - before["reporting_cpu_s"]) / (elapsed / 0.02)
        scrape_begun = time.thread_time()
        for _ in range(20):
            generate_latest(REGISTRY)
        scrape = (time.thread_time() - scrape_begun) / 20
        cost = report / reports_every_s + scrape / scrapes_every_s
    print(
        f"{report * 1e3:.2f} ms a report, {scrape * 1e3:.2f} ms a scrape, {load:.2f} CPUs of load: {cost / load:.4%}"
    )
    assert cost < 0.01 * load
