"""`/readyz` turns red when the tier does not do its work and green again by itself; `/livez` never turns red."""

from pathlib import Path

import httpx

from demo.gateway import GatewayProcess
from demo.stack import free_ports
from tests.monitoring.conftest import HTTP, await_that
from tests.plugin.client import Buffer, Client, contents

SIZE = 10_000
PROBE_PERIOD_S = 10
"""Kubernetes' default."""


class Port:
    """A metrics port as a probe sees it."""

    def __init__(self) -> None:
        (self.number,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.number}"

    def readiness(self) -> tuple[int, list[str]]:
        answer = HTTP.get(f"{self.url}/readyz")
        assert HTTP.get(f"{self.url}/livez").status_code == 200
        word, *reasons = answer.text.splitlines()
        assert word == ("ready" if answer.status_code == 200 else "not ready")
        return answer.status_code, reasons

    def await_code(self, code: int, timeout_s: float) -> list[str]:
        def probe() -> list[str] | None:
            try:
                found, reasons = self.readiness()
            except httpx.TransportError:
                return None
            return reasons if found == code else None

        return await_that(f"{self.url}/readyz is {code}", probe, timeout_s)


def test_the_plugin_without_its_gateway(tmp_path: Path) -> None:
    port = Port()
    objects = {"key": contents(1, SIZE)}
    with GatewayProcess(tmp_path / "store") as gateway:
        params = {**gateway.params, "wait_timeout_s": 1.0, "metrics_port": port.number}
        with Client(**params) as client:
            assert client.set(objects)
            assert port.readiness() == (200, [])
            gateway.end(9)
            reasons = port.await_code(503, PROBE_PERIOD_S)
            assert reasons[0].startswith("connector 0: no session with the gateway (lost): ")
            gateway.start()
            # Until then nothing was asked for, so nothing failed.
            port.await_code(200, 5)
            with gateway.frozen():
                client.answer(client.connector.submit_batch_exists(["key"]))
                reasons = port.await_code(503, PROBE_PERIOD_S)
            assert any("failed" in reason or "no session" in reason for reason in reasons)
    assert HTTP.get(f"{port.url}/readyz").text == "not ready\nthere is no connector\n"


def test_the_gateway_whose_drive_fails(tmp_path: Path) -> None:
    """The file behind a store shrinks, as when somebody truncates it: reads and writes beyond its end fail."""
    port, plugin = Port(), Port()
    store = tmp_path / "store"
    with GatewayProcess(store, store_gb=0.1, metrics_port=port.number, direct_io="off") as gateway:
        port.await_code(200, 10)
        objects = {f"key {i}": contents(i, SIZE) for i in range(20)}
        with Client(**gateway.params, metrics_port=plugin.number) as client:
            assert client.set(objects)
            assert port.readiness() == plugin.readiness() == (200, [])
            (path,) = store.glob("*.dat")
            with path.open("r+b") as file:
                size = path.stat().st_size
                file.truncate(size // 100)
                loaded = client.get(dict.fromkeys(objects, SIZE))
                failed = client.connector.stats()
                (code, reasons), (plugin_code, plugin_reasons) = port.readiness(), plugin.readiness()
                file.truncate(size)
            assert failed["load_miss_io_error"] == sum(each is None for each in loaded.values()) > 0
            assert code == 503 and any(reason.startswith("a read failed") for reason in reasons), reasons
            assert plugin_code == 503 and plugin_reasons[0].startswith("connector 0: a load or lookup failed")
            # What failed shows for 15 seconds.
            port.await_code(200, 30)
            plugin.await_code(200, 5)
            buffer = Buffer(contents(99, SIZE))
            assert client.answer(client.connector.submit_batch_set(["key 99"], [buffer.view]))[1]
