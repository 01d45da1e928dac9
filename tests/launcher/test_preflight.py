"""What is examined before a server starts."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.launcher.harness import free_ports
from xkv_lmcache_autostart import machine, preflight, sockets
from xkv_lmcache_autostart.preflight import Finding, Level
from xkv_lmcache_autostart.settings import load


def findings(tmp_path: Path, **values: str) -> dict[str, Finding]:
    port, http_port = free_ports(2)
    environ = {
        "LMC_PORT": str(port),
        "LMC_HTTP_PORT": str(http_port),
        "LMC_L1_GB": "0.1",
        "LMC_XKV_SLOTS": "64",
        "LMC_XKV_STORE": str(tmp_path / "store"),
        "LMC_XKV_STORE_GB": "0.25",
    }
    return {found.subject: found for found in preflight.examine(load(environ | values, {}), {})}


def cgroup(root: Path, path: str, limit: str, usage: int, inactive: int = 0) -> None:
    """A cgroup v2 folder in a file tree that stands for the machine's."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory")
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_this_machine_can_run_a_small_server(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {finding.level for finding in found.values()} == {Level.OK}, found
    assert set(found) == {
        *("interpreter", "lmcache", "vllm", "plugin", "accelerator", "memory", "/dev/shm", "memlock"),
        *("io_uring", "LMC_PORT", "LMC_HTTP_PORT", "store"),
    }
    assert not (tmp_path / "store").exists(), "examining changes nothing"


def test_too_little_memory(tmp_path: Path) -> None:
    found = findings(tmp_path, LMC_L1_GB="1000000")["memory"]
    assert found.level is Level.FAILURE
    assert "L1 of 1000000 GiB (LMC_L1_GB)" in found.text
    assert "; set LMC_L1_GB=" in found.text


def test_slots_need_memory_too(tmp_path: Path) -> None:
    found = findings(tmp_path, LMC_XKV_SLOTS="1048576", LMC_XKV_FRAG="16MiB")["memory"]
    assert found.level is Level.FAILURE
    assert "slots of 16384.00 GiB" in found.text


def test_memory_is_limited_by_the_cgroup(tmp_path: Path) -> None:
    cgroup(tmp_path, "a/b", "max", 0)
    cgroup(tmp_path, "a", str(2**30), 2**29, inactive=2**20)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    memory = machine.memory(tmp_path)
    assert memory.available == 2**29 + 2**20
    assert memory.limit == f"rest of the memory limit of cgroup {tmp_path}/sys/fs/cgroup/a"


def test_memory_is_limited_by_the_containers_cgroup(tmp_path: Path) -> None:
    """In a container the path in /proc can be the host's, and the limit is at the top of its own tree."""
    cgroup(tmp_path, "", str(2**28), 2**27)
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod1/x\n")
    assert machine.memory(tmp_path).available == 2**27


def test_memory_is_limited_by_a_cgroup_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/memory/docker/x"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(2**28))
    (folder / "memory.usage_in_bytes").write_text(str(2**26))
    (folder / "memory.stat").write_text("total_inactive_file 4096\n")
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n")
    assert machine.memory(tmp_path).available == 2**28 - 2**26 + 4096


def test_without_cgroups_the_machines_memory_counts(tmp_path: Path) -> None:
    memory = machine.memory(tmp_path)
    assert memory.limit == "free memory of the machine"
    assert memory.available > 0


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        found = findings(tmp_path, LMC_PORT=str(port))["LMC_PORT"]
    assert found.level is Level.FAILURE
    assert found.text.startswith(f"LMC_PORT={port} is taken by process {os.getpid()} (")


def test_a_port_taken_on_all_addresses_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        assert f"process {os.getpid()}" in findings(tmp_path, LMC_HTTP_PORT=str(port))["LMC_HTTP_PORT"].text


def test_a_port_that_only_lingers_is_free(tmp_path: Path) -> None:
    """Connections of a server that has just been restarted are still in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    assert findings(tmp_path, LMC_PORT=str(port))["LMC_PORT"].level is Level.OK


@pytest.mark.parametrize(
    ("host", "text"),
    [("192.0.2.1", "192.0.2.1 is no address of this machine"), ("no-such-host.invalid", "does not resolve")],
)
def test_an_address_that_cannot_be_opened(tmp_path: Path, host: str, text: str) -> None:
    found = findings(tmp_path, LMC_HOST=host)["LMC_PORT"]
    assert found.level is Level.FAILURE
    assert text in found.text


def test_a_folder_for_statistics_must_exist(tmp_path: Path) -> None:
    path = str(tmp_path / "none/stats.json")
    found = findings(tmp_path, LMC_XKV_STATS_PATH=path)["stats_path"]
    assert found.level is Level.FAILURE
    assert f"the folder {tmp_path}/none does not exist; make it" in found.text
    assert findings(tmp_path, LMC_XKV_STATS_PATH=str(tmp_path / "x"))["stats_path"].level is Level.OK


def test_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"important" * 1000)
    before = foreign.read_bytes()
    found = findings(tmp_path, LMC_XKV_STORE=str(foreign))["store"]
    assert found.level is Level.FAILURE
    assert str(foreign) in found.text
    assert foreign.read_bytes() == before


def test_a_store_that_does_not_fit(tmp_path: Path) -> None:
    found = findings(tmp_path, LMC_XKV_STORE_GB="100000000")["store"]
    assert found.level is Level.FAILURE
    assert "store_gb" in found.text


def test_transfer_mode_without_accelerator(tmp_path: Path) -> None:
    if machine.accelerator({}):
        pytest.skip("this machine has an accelerator")
    assert findings(tmp_path, LMC_TRANSFER_MODE="lmcache_driven")["accelerator"].level is Level.WARNING


def test_a_chunk_that_does_not_fit_vllm_on_a_cpu(tmp_path: Path) -> None:
    if machine.accelerator({}):
        pytest.skip("this machine has an accelerator")
    found = findings(tmp_path, LMC_CHUNK="100")["accelerator"]
    assert found.level is Level.WARNING
    assert "LMC_CHUNK=100 is no multiple of vLLM's block size on a CPU, 128" in found.text


def test_an_accelerator_can_be_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    assert machine.accelerator({})
    assert machine.accelerator({"CUDA_VISIBLE_DEVICES": "0"})
    assert not machine.accelerator({"CUDA_VISIBLE_DEVICES": ""})
    assert not machine.accelerator({"CUDA_VISIBLE_DEVICES": "-1"})


def test_a_missing_lmcache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    found = findings(tmp_path)["lmcache"]
    assert found.level is Level.FAILURE
    assert "lmcache is not installed for this interpreter; run: pip install lmcache==0.5.4" in found.text


def test_a_foreign_lmcache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lmcache", raising=False)
    found = findings(tmp_path)["lmcache"]
    assert found.level is Level.FAILURE
    assert (
        f"the lmcache in {tmp_path}/lmcache has no multiprocess server; install lmcache 0.5.4" in found.text
    )


def test_a_missing_native_module_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "xkv_lmcache._native", None)
    found = findings(tmp_path)
    assert found["plugin"].level is Level.FAILURE
    assert "install this package's wheel for this interpreter" in found["plugin"].text
    assert "store" not in found, "nothing can examine it"


@pytest.mark.parametrize(
    ("version", "level"), [((0, 5, 4), "failure"), ((0, 5, 5), "failure"), ((0, 5, 6), "ok")]
)
def test_further_adapters_need_an_lmcache_that_does_not_store_failed_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, ...], level: str
) -> None:
    monkeypatch.setattr(machine, "lmcache_version", lambda: version)
    found = findings(tmp_path, LMC_L2_EXTRA='{"type":"fs"}')["lmcache"]
    assert found.level == level
    assert level == "ok" or "LMC_L2_EXTRA needs LMCache 0.5.6 or newer" in found.text


def test_listeners_are_found_by_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (listener,) = sockets.listeners("127.0.0.1", port)
        assert listener.inode in sockets.owned_inodes(os.getpid())
        assert str(os.getpid()) in sockets.holder(listener)
        assert sockets.listeners("127.0.0.2", port) == []
        assert sockets.listeners("0.0.0.0", port) == [listener]


def test_listeners_on_ipv6_that_take_ipv4_count() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        assert len(sockets.listeners("127.0.0.1", server.getsockname()[1])) == 1


@pytest.mark.parametrize(("version", "level"), [((0, 5, 4), "failure"), ((0, 5, 6), "ok")])
def test_retaining_what_was_loaded_needs_an_lmcache_that_drops_failed_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, ...], level: str
) -> None:
    monkeypatch.setattr(machine, "lmcache_version", lambda: version)
    found = findings(tmp_path, LMC_EXTRA_ARGS="--l2-prefetch-policy retain")["lmcache"]
    assert found.level == level
    assert level == "ok" or "--l2-prefetch-policy retain: before 0.5.6" in found.text


def test_versions_that_this_was_not_made_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "lmcache_version", lambda: (0, 6, 0))
    monkeypatch.setattr(machine, "vllm_version", lambda: (0, 27, 1))
    found = findings(tmp_path)
    assert (found["lmcache"].level, found["vllm"].level) == (Level.WARNING, Level.WARNING)
    assert "lmcache 0.6.0 is none of those this was made for" in found["lmcache"].text
    assert "vllm 0.27.1 is not the 0.28" in found["vllm"].text
