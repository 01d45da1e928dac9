"""`vllm serve` behind the launcher, all of it real, when the LMCache server is killed under it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import demo.stack
from demo.stack import CHUNK, Hits, Serving, StackError

pytestmark = [pytest.mark.lmcache, pytest.mark.vllm]

OBJECTS = 3
PROMPT = "".join(chr(97 + (number * number) % 26) for number in range(OBJECTS * CHUNK + 40))

by_module = demo.stack.vllm_command


def vllm_serve(model: Path, port: int) -> list[str]:
    """The command as people type it."""
    rest = by_module(model, port)
    at = rest.index("--model")
    return [str(Path(sys.executable).parent / "vllm"), "serve", str(model), *rest[at + 2 :]]


@pytest.fixture
def serving(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Serving]:
    """Starts all of it with a policy for the server's death, the namespace derived from the model."""
    monkeypatch.setattr(demo.stack, "vllm_command", vllm_serve)
    # vLLM's CPU build is a distribution of another name, for which its command line does not look.
    shim = tmp_path / "shim/vllm-0.28.0+cpu.dist-info"
    shim.mkdir(parents=True)
    (shim / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0+cpu\n")
    (tmp_path / "store").mkdir()

    def start(policy: str) -> Serving:
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(shim.parent), os.environ.get("PYTHONPATH", "")])),
            "LMC_ON_SERVER_EXIT": policy,
            "LMC_MQ_TIMEOUT_S": "5",
            "LMC_XKV_NAMESPACE": "auto",
        }
        params = {"store": str(tmp_path / "store"), "store_gb": 0.5}
        return Serving(tiny_model, tmp_path / f"{policy}.log", params, env)

    return start


def first_answer(running: Serving) -> tuple[int, ...]:
    """The tokens that are right, of a cold request that has been stored when this returns."""
    running.wait_until_ready()
    log = running.service.log.since(0)
    assert "added to the command" in log
    assert "the namespace is derived from the model" in log
    answer, hits = running.ask(PROMPT)
    assert (hits, answer.cached_tokens) == (Hits(0, 0, 0), 0)
    running.settle(OBJECTS)
    return answer.tokens


def test_the_server_is_restarted(serving: Callable[[str], Serving]) -> None:
    with serving("restart") as running:
        tokens = first_answer(running)
        running.end_server(signal.SIGKILL)
        answer, hits = running.ask(PROMPT)
        assert answer.tokens == tokens
        assert (hits.l1, hits.l2) == (0, OBJECTS)
        assert answer.cached_tokens == OBJECTS * CHUNK


def test_the_command_goes_on_without_it(serving: Callable[[str], Serving]) -> None:
    with serving("ignore") as running:
        tokens = first_answer(running)
        mark = running.service.log.mark()
        os.kill(running.server_pid(), signal.SIGKILL)
        running.service.wait_for_text("the command goes on without a cache", mark, 30)
        answer, _ = running.ask(PROMPT)
        assert answer.tokens == tokens
        assert answer.cached_tokens == 0
        with pytest.raises(StackError):
            running.server_pid()
        assert running.service.stop() in (0, 143)


def test_the_command_ends_with_it(serving: Callable[[str], Serving]) -> None:
    with serving("exit") as running:
        first_answer(running)
        family = running.service.family()
        os.kill(running.server_pid(), signal.SIGKILL)
        assert running.service.process.wait(60) == 3
        assert [process for process in family if process.is_running()] == []
        assert "LMC_ON_SERVER_EXIT=exit: the command is stopped" in running.service.log.since(0)
