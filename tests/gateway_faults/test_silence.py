"""Somebody falls silent: the wire between the two, or a client for longer than its lease."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess
from tests.plugin.relay import Relay

from .worlds import ClientProcess, await_that, dropped, network

NUMBERS = list(range(40))
ALL = {"right": 40, "wrong": 0, "missing": 0}
NONE = {"right": 0, "wrong": 0, "missing": 40}
WAIT_S = 2.0


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_packets_that_vanish_cost_one_wait_and_a_session(tmp_path: Path) -> None:
    with (
        network() as here,
        GatewayProcess(tmp_path / "store", prefix=here, client_silence_s=2) as gateway,
        ClientProcess({**gateway.params, "wait_timeout_s": WAIT_S}, here) as client,
    ):
        assert client.ask("set", numbers=NUMBERS) is True
        client.churn(NUMBERS, 5)
        with dropped(here, gateway.port):
            # Its ring still works until its silence is noticed: right bytes or none, and nobody waits longer than that.
            churned = client.answer()
            assert churned["wrong"] == 0 and churned["right"] > 0 and churned["missing"] > 0
            assert churned["longest_s"] < WAIT_S + 1
            lost = client.await_state("lost")
            # It cannot be reached again: TCP still tries, and nobody waits for that.
            assert lost["opened"] == 1
            assert client.ask("churn", numbers=NUMBERS, seconds=0.5) == "churning"
            churned = client.answer()
            assert churned["right"] == 0 and churned["longest_s"] < 0.5
            await_that(
                "the gateway ends the session", lambda: "the client was silent" in gateway.log.read_text()
            )
        client.await_state("open")
        assert client.ask("get", numbers=NUMBERS) == ALL


@pytest.mark.parametrize("busy", [True, False])
def test_a_gateway_that_dies_behind_a_connection_that_lives(busy: bool, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        relay = Relay(gateway.host, gateway.port)
        try:
            params = {**gateway.params, "port": relay.port, "wait_timeout_s": WAIT_S}
            with ClientProcess(params) as client:
                assert client.ask("set", numbers=NUMBERS) is True
                if busy:
                    client.churn(NUMBERS, WAIT_S + 2)
                # Whoever stands between keeps the connection, and has nothing to pass on.
                relay.silent = True
                gateway.end(signal.SIGKILL)
                if busy:
                    churned = client.answer()
                    assert churned["wrong"] == 0 and churned["missing"] > 0
                    assert churned["longest_s"] < WAIT_S + 1
                lost = client.await_state("lost")
                assert any("silent" in change["reason"] for change in lost["history"]), lost
                gateway.start()
                relay.silent = False
                client.await_state("open")
                assert client.ask("get", numbers=NUMBERS) == ALL
        finally:
            relay.close()


def test_a_client_that_is_stopped_for_longer_than_its_lease(tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "store", client_silence_s=1, store_gb=0.1) as gateway,
        ClientProcess({**gateway.params, "batch_slots": 64}) as stopped,
        ClientProcess(gateway.params) as other,
    ):
        assert stopped.ask("set", numbers=NUMBERS) is True
        for round_ in range(3):
            numbers = NUMBERS[10 * round_ : 10 * round_ + 10]
            # In the middle of loads, stores and removals; leases and transactions are open.
            stopped.churn(numbers, 4, store=True)
            await_that(
                "it is at work",
                lambda: any(s["leases"] + s["transactions"] for s in gateway.status()["sessions"]),
            )
            stopped.signal(signal.SIGSTOP)
            try:
                await_that("its session is ended", lambda: len(gateway.status()["sessions"]) == 1)
                left = gateway.status()["sessions"][0]
                assert (left["leases"], left["transactions"], left["in_flight"]) == (0, 0, 0)
                # Its keys are nobody's: they can be stored, loaded, and removed.
                assert other.ask("set", numbers=numbers) is True
                assert other.ask("get", numbers=numbers) == {"right": 10, "wrong": 0, "missing": 0}
            finally:
                stopped.signal(signal.SIGCONT)
            churned = stopped.answer()
            assert churned["wrong"] == 0
            state = stopped.await_state("open")
            assert state["lost"] == round_ + 1
            assert stopped.ask("set", numbers=NUMBERS) is True
            assert stopped.ask("get", numbers=NUMBERS) == ALL


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_what_took_the_place_of_an_object_is_not_read(how: str, tmp_path: Path) -> None:
    """A client reads its gateway's drives, and is stopped in the middle of it. When it goes on its leases are gone and other
    objects are where it reads. Nothing is verified: it must know by itself that what it reads counts no more."""
    rounds, first, others = 8, list(range(800)), list(range(1000, 2200))
    delay, missing = random.Random(5), 0
    settings = {"share_drives": "on", "client_silence_s": 1, "store_gb": 0.1}
    with (
        GatewayProcess(tmp_path / "store", **settings) as gateway,
        ClientProcess({**gateway.params, "verify": "off", "wait_timeout_s": 20}) as stopped,
        ClientProcess({**gateway.params, "wait_timeout_s": 20}) as other,
    ):
        for _ in range(rounds):
            assert stopped.ask("set", numbers=first) is True
            assert stopped.ask("load", numbers=first) == "loading"
            time.sleep(delay.uniform(0, 0.02))
            stopped.signal(signal.SIGSTOP)
            try:
                if how == "killed":
                    gateway.restart(signal.SIGKILL)
                else:
                    await_that("its session is ended", lambda: len(gateway.status()["sessions"]) == 1)
                assert other.ask("set", numbers=others) is True
            finally:
                stopped.signal(signal.SIGCONT)
            outcome = stopped.answer()
            assert outcome["wrong"] == 0, outcome
            missing += outcome["missing"]
            stopped.await_state("open")
    assert missing > 0, "it was never stopped in the middle of a load"
