"""The statistics: every field is described, every description is of a field, and the sums are right."""

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from demo.gateway import GatewayProcess
from tests.backends import Backend
from tests.monitoring.conftest import ROOT, await_that
from tests.plugin.client import Buffer, Client, contents
from xkv_lmcache.params import AdapterParams
from xkv_lmcache.stats_schema import markdown, schema

SIZE = 10_000


def undescribed(state: Any, description: dict[str, Any], path: str = "") -> list[str]:
    """Fields that the schema does not describe."""
    if isinstance(state, list):
        return [
            each for item in state for each in undescribed(item, description.get("items", {}), path + "[]")
        ]
    if not isinstance(state, dict):
        return []
    known = description.get("properties", {})
    found = [f"{path}.{name}" for name in state if name not in known]
    return found + [
        each
        for name, value in state.items()
        if name in known
        for each in undescribed(value, known[name], f"{path}.{name}")
    ]


def check(state: dict[str, Any]) -> None:
    jsonschema.validate(state, schema())
    assert undescribed(state, schema()) == []


def with_deletes(path: Path) -> dict[str, Any] | None:
    """The statistics in the file, once it is there and they count a delete."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if found and found["operations"]["delete"]["keys"] == 1 else None


def test_what_is_counted_is_described_and_adds_up(backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    params = backend.params(tmp_path / "store", store_gb=0.1, fragment_bytes=4096)
    with Client(**params, stats_path=str(path), stats_interval_s=0.05, namespace="n") as client:
        check(client.connector.stats())
        objects = {f"key {i}": contents(i, SIZE) for i in range(10)}
        assert client.set(objects) and client.set(objects)
        assert client.get({"key 0": SIZE, "absent": SIZE}) == {"key 0": objects["key 0"], "absent": None}
        assert client.get({"key 1": SIZE + 1}) == {"key 1": None}
        assert client.exists(["key 2", "absent"]) == [True, False]
        assert client.delete(["key 3"]) == [True]
        state = client.connector.stats()
        written = await_that("the file has all of it", lambda: with_deletes(path))
    for each in (state, written, json.loads(path.read_text())):
        check(each)
        assert each["mode"] == backend.kind and each["namespace"] == "n"
        counts = {name: value for name, value in each.items() if name.startswith(("store_", "l")) and value}
        assert counts == {
            "store_stored": 10,
            "store_skipped": 10,
            "load_miss_absent": 1,
            "load_miss_size": 1,
            "lookup_miss_absent": 1,
        }
        operations = each["operations"]
        assert {name: (each["tasks"], each["keys"], each["hits"]) for name, each in operations.items()} == {
            "set": (2, 20, 10),
            "get": (2, 3, 1),
            "exists": (1, 2, 1),
            "delete": (1, 1, 1),
        }
        for operation in operations.values():
            buckets = [count for _, count in operation["latency_us"]["buckets"]]
            assert buckets == sorted(buckets) and buckets[-1] == operation["answered"] == operation["tasks"]
            # The histogram keeps two digits.
            assert operation["latency_us"]["sum"] >= 0.98 * operation["latency_us"]["max"]
        assert each["process"]["rss_bytes"] > 2**20 and each["process"]["cpu_s"] > 0
    assert state["health"] == {
        "ready": True,
        "reasons": [],
        "load_failed_ago_s": None,
        "store_failed_ago_s": None,
    }
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("stats.json.")], "all renamed"


def test_readers_see_a_whole_file_or_none(tmp_path: Path) -> None:
    path, stop, torn = tmp_path / "stats.json", threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                json.loads(path.read_text())
            except FileNotFoundError:
                pass
            except ValueError as error:
                torn.append(error)

    with Client(store=str(tmp_path / "store"), store_gb=0.1, stats_path=str(path), stats_interval_s=0.001):
        reader = threading.Thread(target=read)
        reader.start()
        seen: set[float] = set()

        def many() -> bool | None:
            if path.exists():
                seen.add(json.loads(path.read_text())["time_s"])
            return len(seen) > 50 or None

        await_that("fifty rewrites", many)
        stop.set()
        reader.join()
    assert torn == []


def test_a_gateway_that_is_gone_is_a_cause_of_its_own(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway, Client(**gateway.params, wait_timeout_s=1) as client:
        objects = {"key": contents(1, SIZE)}
        assert client.set(objects) and client.exists(["key", "absent"]) == [True, False]
        gateway.end(9)
        assert client.exists(["key", "absent"]) == [False, False]
        buffer = Buffer(objects["key"])
        client.answer(client.connector.submit_batch_set(["other"], [buffer.view]))
        state = client.connector.stats()
        check(state)
        assert (state["lookup_miss_absent"], state["lookup_miss_unreachable"]) == (1, 2)
        assert state["store_unreachable"] == 1
        assert state["session"]["state"] == "lost" and state["session"]["history"][-1]["state"] == "lost"
        assert not state["health"]["ready"]
        assert state["health"]["reasons"][0].startswith("no session with the gateway (lost): ")


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "stats.md").read_text()
    assert page.endswith(markdown()), "write it again: python3 -m xkv_lmcache.stats_schema"


def test_every_default_of_the_page_is_the_parameter_s() -> None:
    page = (ROOT / "docs" / "stats.md").read_text()
    assert f"`stats_interval_s` ({AdapterParams().stats_interval_s:g} s)" in page
    with pytest.raises(ValueError, match="stats_interval_s=0"):
        AdapterParams.parse({"stats_interval_s": 0})
