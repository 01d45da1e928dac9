"""A gateway that freezes, and one that is killed, under the real LMCache server and the real vLLM: one prompt waits for
it once, none hangs, tokens stay right, and hits come back with it."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess
from demo.stack import CHUNK, Serving

pytestmark = [pytest.mark.lmcache, pytest.mark.vllm]

OBJECTS = 4
PROMPTS = 20
WAIT_S = 10.0
"""`wait_timeout_s`: above what any of these prompts takes by itself, so that a wait shows."""


def text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def await_open(stats: Path) -> None:
    """Returns when the plugin, by its own word, has a session again."""
    deadline = time.monotonic() + 60
    while json.loads(stats.read_text())["session"]["state"] != "open":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_gateway_that_freezes_and_one_that_dies(tiny_model: Path, tmp_path: Path) -> None:
    kept = text(1, OBJECTS * CHUNK + 50)
    new = [text(100 + number, CHUNK + 40) for number in range(PROMPTS)]
    with GatewayProcess(tmp_path / "store", fragment_bytes="auto", store_gb=1) as gateway:
        stats = tmp_path / "stats.json"
        params = {
            **gateway.params,
            "batch_slots": 1024,
            "wait_timeout_s": WAIT_S,
            "stats_path": str(stats),
            "stats_interval_s": 0.5,
        }
        with Serving(tiny_model, tmp_path / "serving.log", params) as serving:
            serving.wait_until_ready()
            right, hits = serving.ask(kept)
            assert (hits.l1, hits.l2) == (0, 0)
            serving.settle(OBJECTS)
            normal = max(serving.ask(text(10 + number, CHUNK + 40), 4)[0].ttft_s for number in range(3))
            serving.settle(OBJECTS + 3)
            serving.clear_l1()

            with gateway.frozen():
                asked = [serving.ask(prompt, 4) for prompt in new]
                assert all((hits.l1, hits.l2) == (0, 0) for _, hits in asked)
                first, *others = [answer.ttft_s for answer, _ in asked]
                assert first < WAIT_S + 3 * normal + 2, (first, normal)
                assert max(others) < WAIT_S, "nobody else waits for it"
                assert json.loads(stats.read_text())["session"]["state"] == "lost"
                # What is in L1 is answered as ever.
                again, hits = serving.ask(new[0], 4)
                assert (hits.l1, hits.l2) == (1, 0)
                assert again.tokens == asked[0][0].tokens

            await_open(stats)
            serving.clear_l1()
            answer, hits = serving.ask(kept)
            assert (hits.l1, hits.l2) == (0, OBJECTS), "hits come back"
            assert answer.tokens == right.tokens
            # What was computed meanwhile was right, and can be stored now.
            anew, hits = serving.ask(new[1], 4)
            assert (hits.l1, hits.l2) == (0, 0)
            assert anew.tokens == asked[1][0].tokens
            serving.settle(1)
            serving.clear_l1()
            from_l2, hits = serving.ask(new[1], 4)
            assert (hits.l1, hits.l2) == (0, 1)
            assert from_l2.tokens == anew.tokens

            server = serving.server_pid()
            gateway.end(signal.SIGKILL)
            serving.clear_l1()
            answer, hits = serving.ask(kept)
            assert (hits.l1, hits.l2) == (0, 0)
            assert answer.tokens == right.tokens
            serving.settle(OBJECTS)
            assert json.loads(stats.read_text())["session"]["state"] == "lost"
            gateway.start()
            await_open(stats)
            serving.clear_l1()
            answer, hits = serving.ask(kept)
            assert (hits.l1, hits.l2) == (0, OBJECTS), "what was acknowledged is there"
            assert answer.tokens == right.tokens
            assert serving.server_pid() == server
            print(f"first {first:.2f} s, others at most {max(others):.2f} s, normal {normal:.2f} s")
