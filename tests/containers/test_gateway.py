"""The gateway's image: small, not root, nothing writable but the store, and what it says where io_uring is refused."""

from __future__ import annotations

import grp
import json
import os
from pathlib import Path

import pytest

from demo.stack import StackError, free_ports
from tests.conftest import LoopDevices
from tests.containers.conftest import SharedMemory
from tests.containers.podman import GATEWAY, USER, Container, gateway, owned_folder, podman

pytestmark = pytest.mark.containers


def test_what_is_in_it() -> None:
    found = json.loads(podman("image", "inspect", GATEWAY))[0]
    assert found["Config"]["User"] == f"{USER}:{USER}"
    assert found["Size"] < 250e6
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "xkv-gateway"
    assert labels["org.opencontainers.image.version"] == GATEWAY.rpartition(":")[2]
    assert found["HealthCheck" if "HealthCheck" in found else "Healthcheck"]["Test"] == [
        "CMD",
        "xkv",
        "gateway",
        "status",
    ]


def test_it_serves_without_rights_and_without_io_uring(tmp_path: Path, shared_memory: SharedMemory) -> None:
    """Podman's default seccomp profile refuses io_uring, as Docker's does."""
    (port,) = free_ports(1)
    store = owned_folder(tmp_path / "store")
    with gateway(store, port) as container:
        container.wait_for_text("serving a store", 60)
        lines = [json.loads(line) for line in container.log().splitlines()]
        refusals = [line for line in lines if "io_uring is refused" in line["event"]]
        assert [line["level"] for line in refusals] == ["warning"], "said once"
        assert "using threads instead" in refusals[0]["event"]
        (serving,) = [line["event"] for line in lines if "serving a store" in line["event"]]
        assert "(pool" in serving

        # The image's healthcheck, by hand: podman runs it through systemd.
        code, text = container.exec("xkv", "gateway", "status", f"--port={port}")
        assert code == 0, text
        assert "sessions   0 open" in text
        assert container.exec("sh", "-c", "touch /opt/xkv/x")[0] != 0
        capabilities = container.exec("grep", "-E", "^(CapEff|NoNewPrivs|Uid)", "/proc/1/status")[1].split()
        assert capabilities[:2] == ["Uid:", str(USER)]
        assert capabilities[capabilities.index("CapEff:") + 1] == "0" * 16
        assert capabilities[-1] == "1"

        assert container.stop() == 0
        assert "io_uring is refused" not in container.log().split("using threads instead", 1)[1]
    assert [path.name for path in store.iterdir()] == ["xkv-store.dat"]


def test_it_takes_io_uring_where_the_profile_allows_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    store = owned_folder(tmp_path / "store")
    # What docs/containers.md does with jq.
    profile = json.loads(Path("/usr/share/containers/seccomp.json").read_text())
    names = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
    profile["syscalls"].append({"names": names, "action": "SCMP_ACT_ALLOW"})
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    with gateway(store, port, f"--security-opt=seccomp={tmp_path}/profile.json") as container:
        container.wait_for_text("serving a store", 60)
        assert "(io_uring" in container.log()
        assert "refused" not in container.log()


def test_a_store_outlives_its_container(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    store = owned_folder(tmp_path / "store")
    identities = []
    for _ in range(2):
        with gateway(store, port) as container:
            container.wait_for_text("serving a store", 60)
            identities += [
                json.loads(line)["store"] for line in container.log().splitlines() if '"store"' in line
            ]
            assert container.stop() == 0
    assert len(identities) == 2
    assert identities[0] == identities[1]


def test_a_drive_by_its_group(tmp_path: Path, loop_devices: LoopDevices, shared_memory: SharedMemory) -> None:
    """A block device in a container that is not root: what `k8s/block` and docs/containers.md do."""
    (port,) = free_ports(1)
    (device,) = loop_devices(1, 2**28)
    # As udev has drives: root's and the group's `disk`.
    group = grp.getgrnam("disk").gr_gid
    os.chown(device, 0, group)
    device.chmod(0o660)
    command = ["gateway", "serve", f"--port={port}", "--store=/dev/xkv0"]
    options = [f"--device={device}:/dev/xkv0", f"--group-add={group}"]
    with Container(GATEWAY, command, options=options) as container:
        container.wait_for_text("serving a store of 1 drive: /dev/xkv0", 60)
        assert container.stop() == 0
    with Container(GATEWAY, command, options=options[:1]) as container:
        with pytest.raises(StackError, match="ended with 1"):
            container.wait_for_text("serving a store", 60)
        assert "/dev/xkv0" in container.log()


CLIENT = """
import mmap, os, select, sys
from xkv_lmcache import XkvL2Connector

assert not os.path.exists("/dev/xkv0")
connector = XkvL2Connector(host="127.0.0.1", port=int(sys.argv[1]), fragment_bytes=131072)


def ask(task):
    while True:
        assert select.select([connector.event_fd()], [], [], 30)[0], "no answer"
        for answer in connector.drain_completions():
            if answer[0] == task:
                return answer


size = 4 << 20
data, found = os.urandom(size), mmap.mmap(-1, size)
stored = ask(connector.submit_batch_set(["key"], [memoryview(data)]))
assert stored[1], stored
loaded = ask(connector.submit_batch_get(["key"], [memoryview(found)]))
assert loaded[3] == [True] and found[:] == data, loaded
print("loaded", flush=True)
sys.stdin.read()
"""


def test_a_client_reads_the_drive_that_only_the_gateway_has(
    tmp_path: Path, loop_devices: LoopDevices, shared_memory: SharedMemory
) -> None:
    """Descriptors pass from container to container; nobody else's container needs the device, or a right to it."""
    (port,) = free_ports(1)
    (device,) = loop_devices(1, 2**28)
    device.chmod(0o600)
    os.chown(device, USER, USER)
    command = ["gateway", "serve", f"--port={port}", "--store=/dev/xkv0"]
    with Container(GATEWAY, command, options=[f"--device={device}:/dev/xkv0"]) as serving:
        serving.wait_for_text("serving a store of 1 drive: /dev/xkv0", 60)
        client = Container(
            GATEWAY, ["-c", CLIENT, str(port)], options=["--entrypoint=python3", "--interactive"]
        )
        with client:
            client.wait_for_text("loaded", 60)
            assert "read through the gateway" not in client.log()
            code, text = serving.exec("xkv", "gateway", "status", f"--port={port}", "--json")
            assert code == 0, text
            (session,) = json.loads(text)["sessions"]
            # The bytes of reads are told when a lease is closed.
            assert session["straight"] is True
            assert session["bytes_written"] == session["bytes_read"] == 4 << 20
        assert serving.stop() == 0
