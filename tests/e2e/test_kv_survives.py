"""The product's promise, on the real LMCache server and the real vLLM: KV cache survives, and answers stay the same.

One vLLM without any cache says what is right. Another one, behind the launcher, is asked the same: cold, from L1, and
from L2 after its server ended by SIGTERM, by SIGKILL, and after everything was started anew. Greedy tokens must be equal
each time, and where an answer came from is read off the server's log and counters, never off the clock.
"""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from demo.stack import CHUNK, Answer, Hits, Serving
from tests.backends import Backend

# Three minutes alone on two cores; a machine that is busy with other things may take its time.
pytestmark = [pytest.mark.lmcache, pytest.mark.vllm, pytest.mark.timeout(1800)]

OBJECTS = 5


def text(seed: int, length: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz "
    return "".join(random.Random(seed).choices(letters, k=length))


FIRST = text(1, OBJECTS * CHUNK + 70)
SECOND = text(2, OBJECTS * CHUNK + 130)
SHARED = FIRST[: 3 * CHUNK + 20] + text(3, 400)
"""Begins as FIRST does: its first three objects are FIRST's."""


@pytest.fixture(scope="module")
def right(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """Prompt -> the tokens that vLLM answers without a cache, run by the launcher as a plain command."""
    log = tmp_path_factory.mktemp("alone") / "vllm.log"
    with Serving(tiny_model, log, adapter_params=None) as serving:
        serving.wait_until_ready()
        answers = {prompt: serving.ask(prompt)[0] for prompt in (FIRST, SECOND, SHARED)}
    assert all(answer.cached_tokens == 0 for answer in answers.values())
    tokens = {prompt: answer.tokens for prompt, answer in answers.items()}
    # A model that says the same whatever it is asked would hide a wrong cache.
    assert len(set(tokens.values())) == 3
    return tokens


def check(answer: Answer, hits: Hits, tokens: tuple[int, ...], *, l1: int = 0, l2: int = 0) -> None:
    assert (hits.l1, hits.l2) == (l1, l2)
    assert answer.cached_tokens == (l1 + l2) * CHUNK
    assert answer.tokens == tokens


def counted(stats: Path) -> dict[str, Any]:
    """The plugin's own counts, as of when its server ended."""
    found: dict[str, Any] = json.loads(stats.read_text())
    return found


def test_every_answer_is_the_same(
    backend: Backend, tiny_model: Path, right: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    stats = tmp_path / "stats.json"
    adapter_params = backend.params(tmp_path / "store", store_gb=1, stats_path=str(stats))

    with Serving(tiny_model, tmp_path / "first.log", adapter_params) as serving:
        serving.wait_until_ready()

        # Cold: nothing is found, everything is stored.
        for prompt in (FIRST, SECOND):
            check(*serving.ask(prompt), right[prompt])
        serving.settle(2 * OBJECTS)
        assert serving.l2_objects_loaded() == 0

        # L1.
        check(*serving.ask(FIRST), right[FIRST], l1=OBJECTS)
        assert serving.l2_objects_loaded() == 0

        # L2, after the server was asked to end.
        serving.end_server(signal.SIGTERM)
        assert counted(stats)["store_stored"] == 2 * OBJECTS
        check(*serving.ask(FIRST), right[FIRST], l2=OBJECTS)
        assert serving.l2_objects_loaded() == OBJECTS

        # L2, after the server was killed; a prompt that shares its beginning takes just that.
        serving.end_server(signal.SIGKILL)
        assert serving.l2_objects_loaded() == 0
        check(*serving.ask(SECOND), right[SECOND], l2=OBJECTS)
        check(*serving.ask(SHARED), right[SHARED], l2=3)
        assert serving.l2_objects_loaded() == OBJECTS + 3

        # What was computed beyond the shared beginning was stored as well.
        serving.settle(len(SHARED) // CHUNK - 3)
        serving.end_server(signal.SIGKILL)
        check(*serving.ask(SHARED), right[SHARED], l2=len(SHARED) // CHUNK)

        # vLLM's own count of all this agrees with the server's.
        assert serving.vllm_tokens_taken() == (3 * OBJECTS + 3 + len(SHARED) // CHUNK) * CHUNK
        assert "Something went wrong" not in serving.service.log.since(0)

    # L2, by a vLLM and a server that never saw the prompt.
    with Serving(tiny_model, tmp_path / "second.log", adapter_params) as serving:
        serving.wait_until_ready()
        check(*serving.ask(FIRST), right[FIRST], l2=OBJECTS)
        assert serving.l2_objects_loaded() == OBJECTS
    final = counted(stats)
    assert (final["operations"]["get"]["keys"], final["operations"]["get"]["hits"]) == (OBJECTS, OBJECTS)
