"""`container run|stop|logs|status` against a real engine: podman's Docker-compatible API.

The image is an empty root; the interpreter, its packages and this repository are mounted into it. The LMCache server in
it is the stand-in, except where the real one is said.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LoopDevices
from tests.launcher.harness import REPOSITORY, STANDIN, await_value, environment, free_ports
from xkv_lmcache_autostart.containers import Wishes, container_environment, specification
from xkv_lmcache_autostart.settings import load

IMAGE = f"localhost/xkv-test-{uuid.uuid4().hex[:8]}:latest"


def limits() -> list[str]:
    """Limits that this machine allows: an engine without the right to raise them cannot give its own defaults."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes == resource.RLIM_INFINITY:
        processes = 1024
    return [f"--ulimit=nofile={min(files, 1024)}", f"--ulimit=nproc={min(processes, 1024)}"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of podman's API, with the image in its store."""
    if shutil.which("podman") is None or os.geteuid() != 0:
        pytest.skip("needs podman and root; scripts/setup.py test-tools brings podman")
    folder = tmp_path_factory.mktemp("podman")
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("usr", "etc", "dev", "proc", "sys", "tmp", "run", "root", "var"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
    subprocess.run(["podman", "import", "--quiet", str(archive), IMAGE], check=True, capture_output=True)
    trial = ["podman", "run", "--rm", "--network=host", "--ipc=host", *limits(), "--volume=/usr:/usr:ro"]
    done = subprocess.run([*trial, IMAGE, "/usr/bin/true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine may not run containers: {done.stderr.strip()}")
    address = f"unix://{folder}/podman.sock"
    with subprocess.Popen(
        ["podman", "system", "service", "--time=0", address], stderr=subprocess.DEVNULL
    ) as api:
        try:
            await_value(Path(folder, "podman.sock").is_socket)
            yield address
        finally:
            api.send_signal(signal.SIGTERM)
            api.wait(10)
            subprocess.run(["podman", "rmi", IMAGE], check=False, capture_output=True)


@dataclass
class Server:
    """A container of our own, and the command that handles it."""

    engine: str
    folder: Path
    name: str = field(default_factory=lambda: f"xkv-test-{uuid.uuid4().hex[:8]}")
    ports: list[int] = field(default_factory=lambda: free_ports(2))

    def call(self, verb: str, *arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "xkv_lmcache_autostart",
                "container",
                verb,
                "--name",
                self.name,
                *arguments,
            ],
            env=environment(DOCKER_HOST=self.engine, **values),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def run(self, *arguments: str, real: bool = False, **values: str) -> subprocess.CompletedProcess[str]:
        mounts = {"/usr", str(REPOSITORY), sys.base_prefix, sys.prefix}
        paths = [str(REPOSITORY)] if real else [str(STANDIN), str(REPOSITORY)]
        settings = {
            "LMC_PORT": str(self.ports[0]),
            "LMC_HTTP_PORT": str(self.ports[1]),
            "LMC_L1_GB": "0.2",
            "LMC_XKV_STORE": str(self.folder / "store"),
            "LMC_XKV_STORE_GB": "0.25",
            "LMC_XKV_SLOTS": "64",
            "LMC_XKV_NAMESPACE": "n",
            "LMC_PASS_ENV": "PYTHONPATH XKV_*",
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")])),
            "LMC_WAIT_S": "120",
        }
        return self.call(
            "run",
            *("--image", IMAGE, "--entrypoint", sys.executable, "--restart", "no", *limits()),
            *(f"--volume={path}:{path}:ro" for path in sorted(mounts)),
            *arguments,
            **{**settings, **values},
        )

    def inspect(self) -> dict[str, Any]:
        done = subprocess.run(["podman", "inspect", self.name], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[Server]:
    made = Server(engine, tmp_path)
    yield made
    subprocess.run(["podman", "rm", "--force", "--time=0", made.name], check=False, capture_output=True)


@pytest.mark.lmcache
def test_the_real_server_runs_on_a_block_device(server: Server, loop_devices: LoopDevices) -> None:
    (device,) = loop_devices(1, 2**28)
    done = server.run("--xkv-store", str(device), real=True, LMC_WAIT_S="240")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{server.name} is ready after" in done.stdout
    found = server.inspect()
    process = psutil.Process(found["State"]["Pid"])
    for name in ("net", "ipc"):
        assert os.readlink(f"/proc/{process.pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
    assert os.stat(f"/proc/{process.pid}/root/dev/shm").st_dev == os.stat("/dev/shm").st_dev
    assert "lmcache.v1.multiprocess.http_server" in process.cmdline(), (
        "the server is the container's process 1"
    )
    listening = {entry.laddr.port for entry in process.net_connections("tcp") if entry.status == "LISTEN"}
    assert set(server.ports) <= listening
    report = json.loads(server.call("status", "--json").stdout)
    assert (report["state"], report["ready"]) == ("running", True)
    log = server.call("logs").stdout
    assert f"store of 1 drive: {device}" in server.call("logs").stderr + log
    assert server.call("stop").returncode == 0
    assert not process.is_running()


def test_run_again_changes_nothing_and_other_settings_need_replace(server: Server) -> None:
    first = server.run()
    assert first.returncode == 0, first.stdout + first.stderr
    made = server.inspect()["Id"]
    assert f"{server.folder}/store" in [mount["Source"] for mount in server.inspect()["Mounts"]]

    again = server.run()
    assert again.returncode == 0
    assert "runs already, with these settings" in again.stdout
    assert server.inspect()["Id"] == made

    other = server.run(LMC_CHUNK="512")
    assert other.returncode == 1
    assert "has other settings (LMC_CHUNK); --replace ends it" in other.stderr
    assert server.inspect()["Id"] == made

    assert server.call("stop").stdout == f"{server.name} is stopped\n"
    assert server.inspect()["State"]["Running"] is False
    assert "is started again" in server.run().stdout
    assert server.inspect()["Id"] == made

    replaced = server.run("--replace", LMC_CHUNK="512")
    assert replaced.returncode == 0, replaced.stdout + replaced.stderr
    assert server.inspect()["Id"] != made
    assert "LMC_CHUNK=512" in server.inspect()["Config"]["Env"]


def test_status_logs_and_stop(server: Server) -> None:
    absent = server.call("status")
    assert (absent.returncode, absent.stdout) == (1, f"{server.name}: absent, not ready\n")
    assert server.call("stop").returncode == 0
    assert server.call("logs").returncode == 1
    assert server.run(LMC_EXTRA_ARGS="--my-token hunter2").returncode == 0
    status = server.call("status")
    assert status.returncode == 0
    assert "hunter2" not in status.stdout
    assert "LMC_EXTRA_ARGS='--my-token" in status.stdout
    assert status.stdout.startswith(f"{server.name}: running, ready\n")
    assert f"LMC_PORT={server.ports[0]}" in status.stdout
    logs = server.call("logs")
    assert "stand-in server: start 1" in logs.stdout + logs.stderr
    assert "is removed" in server.call("stop", "--remove").stdout
    assert server.call("status").returncode == 1


def test_a_server_that_does_not_start_is_stopped_and_quoted(server: Server) -> None:
    done = server.run(XKV_STANDIN="fail")
    assert done.returncode == 1
    assert f"{server.name} did not start: it ended before it was ready; it is stopped" in done.stderr
    assert "the drive is on fire" in done.stderr
    assert server.inspect()["State"]["Running"] is False


def test_a_container_of_somebody_else_is_left_alone(server: Server) -> None:
    subprocess.run(
        ["podman", "create", "--name", server.name, IMAGE, "true"], check=True, capture_output=True
    )
    done = server.run("--replace")
    assert done.returncode == 1
    assert "is none of ours; choose another --name" in done.stderr


def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    done = Server(f"unix://{tmp_path}/none.sock", tmp_path).call("status")
    assert done.returncode == 1
    assert f"no container engine answers at unix://{tmp_path}/none.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_named_docker_is_not_the_sdk(tmp_path: Path) -> None:
    """Without the SDK, Python takes a folder of that name next to it for a package."""
    needed = [
        "click",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "typing_extensions.py",
    ]
    needed += ["structlog", "psutil", "tenacity"]
    packages = Path(psutil.__file__).parents[1]
    (tmp_path / "packages").mkdir()
    for name in needed:
        (tmp_path / "packages" / name).symlink_to(packages / name)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/Dockerfile").touch()
    done = subprocess.run(
        [sys.executable, "-S", "-m", "xkv_lmcache_autostart", "container", "status"],
        env=environment(PYTHONPATH=f"{tmp_path}/packages{os.pathsep}{REPOSITORY}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the Docker SDK for Python is missing; run: pip install 'xkv-lmcache[docker]'" in done.stderr


WISHES = Wishes("image", "name", "auto", "no", "python3", (), (), ())


def test_gpus_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    configuration = load({"LMC_XKV_STORE": str(tmp_path)}, {})
    assert specification(configuration, WISHES, {}, accelerator=True)["gpus"] is True
    assert specification(configuration, WISHES, {}, accelerator=False)["gpus"] is False


def test_what_the_settings_name_is_mounted(tmp_path: Path) -> None:
    values = {"LMC_XKV_STORE": f"{tmp_path}/a,{tmp_path}/b", "LMC_XKV_STATS_PATH": f"{tmp_path}/s/stats.json"}
    found = specification(load(values, {}), WISHES, {}, accelerator=False)
    assert found["volumes"] == [f"{tmp_path}/{name}:{tmp_path}/{name}:rw" for name in ("a", "b", "s")]
    assert (tmp_path / "a").is_dir()
    assert found["devices"] == []


def test_the_containers_environment_is_the_settings() -> None:
    environ = {
        "LMC_PORT": "7000",
        "LMC_ENABLE": "1",
        "LMC_XKV_PARAMS": '{"namespace":"auto"}',
        "PATH": "/bin",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "OTEL_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "wanted",
        "LMC_PASS_ENV": "AWS_*",
    }
    settings = load(environ, {"chunk": "512"}).settings.with_namespace("model-1")
    assert container_environment(environ, {"chunk": "512"}, settings) == {
        "LMC_PORT": "7000",
        "LMC_CHUNK": "512",
        "LMC_XKV_NAMESPACE": "model-1",
        "LMC_PASS_ENV": "AWS_*",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "AWS_SECRET_ACCESS_KEY": "wanted",
    }
