"""What the tests of monitoring share: a Prometheus, and what is read off a metrics port."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from demo.stack import Service, answers_200, free_ports

ROOT = Path(__file__).parents[2]
HTTP = httpx.Client(trust_env=False, timeout=10)

T = TypeVar("T")


def await_that(what: str, probe: Callable[[], T | None], timeout_s: float = 30) -> T:
    """The first result of `probe` that is not None."""
    deadline = time.monotonic() + timeout_s
    while (found := probe()) is None:
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return found


def series(text: str, prefix: str = "xkv_") -> dict[str, float]:
    """Samples of an exposition by name and labels, as they are written."""
    found = re.findall(rf"^({prefix}\S*) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def program(name: str, package: str) -> str:
    """A program of a Debian package, which is installed when it is missing. Skips where that cannot be."""
    if shutil.which(name) is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"{name} is missing; as root: apt-get install -y --no-install-recommends {package}")
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, env=env, capture_output=True, check=False).returncode != 0:
            subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
            done = subprocess.run(install, env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return name


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool", "prometheus")


class Prometheus:
    """A real one, scraping every second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        folder.mkdir()
        (self.port,) = free_ports(1)
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [address]}]}
            for name, address in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "monitoring" / "alerts.yml")],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
        ]
        command += [f"--web.listen-address=127.0.0.1:{self.port}"]
        self.service = Service(command, folder / "prometheus.log", {})
        ready = f"http://127.0.0.1:{self.port}/-/ready"
        self.service.wait_for("a ready Prometheus", lambda: answers_200(ready), 60)

    def get(self, path: str, **params: str) -> Any:
        answer = HTTP.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The samples of an instant query."""
        result = self.get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def await_value(self, expression: str, wanted: Callable[[float], bool], timeout_s: float = 30) -> float:
        def probe() -> float | None:
            return next((value for _, value in self.query(expression) if wanted(value)), None)

        return await_that(expression, probe, timeout_s)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[dict[str, str]], Prometheus]]:
    """Starts a Prometheus on targets by job; it ends with the module."""
    program("prometheus", "prometheus")
    started: list[Prometheus] = []

    def start(targets: dict[str, str]) -> Prometheus:
        started.append(Prometheus(tmp_path_factory.mktemp("prometheus") / "run", targets))
        return started[-1]

    yield start
    for each in started:
        each.service.stop()
