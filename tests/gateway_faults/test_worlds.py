"""A gateway and clients that do not share all of a machine: host, shared folder, process numbers, users, names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess

from .worlds import ClientProcess, await_that, join, network, with_file, with_own_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

NUMBERS = list(range(20))
ALL = {"right": 20, "wrong": 0, "missing": 0}
NONE = {"right": 0, "wrong": 0, "missing": 20}
SAME_PID = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OTHER_USERS = ("unshare", "--user", "--map-root-user")


def test_a_gateway_on_another_host_is_named_as_such(tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("secret\n")
    with network() as here, network() as there:
        _, address = join(here, there)
        gateway = GatewayProcess(tmp_path / "store", host=address, prefix=there, token_file=token)
        gateway.prefix = (*there, *with_own_folder(Path(gateway.settings["shm_dir"])))
        params = {**gateway.params, "token_file": str(token), "wait_timeout_s": 2.0}
        with gateway, ClientProcess(params, here) as client:
            assert client.ask("set", numbers=NUMBERS) is False
            assert client.ask("get", numbers=NUMBERS) == NONE
            reason = client.ask("session")["reason"]
            assert "another host" in reason and "shm_dir" in reason and str(params["shm_dir"]) in reason


def test_a_shared_folder_that_both_name_and_do_not_share(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "store")
    gateway.prefix = with_own_folder(Path(gateway.settings["shm_dir"]))
    with gateway, ClientProcess(gateway.params) as client:
        assert client.ask("set", numbers=NUMBERS) is False
        assert "not the same folder on both sides" in client.ask("session")["reason"]
        # One that shares it needs no more than that.
        gateway.end()
        gateway.prefix = ()
        gateway.start()
        client.await_state("open")
        assert client.ask("set", numbers=NUMBERS) is True
        assert client.ask("get", numbers=NUMBERS) == ALL


def test_processes_that_all_have_the_same_number(tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "store", prefix=SAME_PID) as gateway,
        ClientProcess(gateway.params, SAME_PID) as first,
        ClientProcess(gateway.params, SAME_PID) as second,
    ):
        for process in (gateway.pid, *(client.pid for client in (first, second))):
            assert (
                Path(f"/proc/{process}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1]
                == "1"
            )
        assert first.ask("set", numbers=NUMBERS) is True
        assert second.ask("get", numbers=NUMBERS) == ALL
        first.churn(NUMBERS, 60)
        first.signal(signal.SIGKILL)
        await_that("one session less", lambda: len(gateway.status()["sessions"]) == 1)
        assert second.ask("get", numbers=NUMBERS) == ALL
        gateway.restart(signal.SIGKILL)
        second.await_state("open")
        assert second.ask("get", numbers=NUMBERS) == ALL


def test_users_of_another_namespace(tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "store") as gateway,
        ClientProcess(gateway.params, OTHER_USERS) as client,
        ClientProcess(gateway.params) as other,
    ):
        assert client.ask("set", numbers=NUMBERS) is True
        assert other.ask("get", numbers=NUMBERS) == ALL
        gateway.restart(signal.SIGKILL)
        client.await_state("open")
        assert client.ask("get", numbers=NUMBERS) == ALL


@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", "::1"])
def test_localhost_that_is_ipv6_first(listen: str, tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("::1 localhost\n127.0.0.1 localhost\n")
    here = with_file(hosts, "/etc/hosts")
    gateway = GatewayProcess(tmp_path / "store", host=listen, prefix=here)
    with gateway, ClientProcess({**gateway.params, "host": "localhost"}, here) as client:
        assert client.ask("localhost") == ["::1", "127.0.0.1"]
        assert client.ask("set", numbers=NUMBERS) is True
        assert client.ask("get", numbers=NUMBERS) == ALL
