"""`xkv verify` on the real vLLM: it finds no difference where there is none, and finds the one that wrong bytes make."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from demo.model import TINY, make
from demo.stack import ONE_THREAD, ROOT, Serving
from demo.verify import command
from tests.monitoring.conftest import HTTP
from xkv_lmcache.cli.verify import Answer, Outcome

PROMPTS = 2


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """vLLM with a tier that does not look at what it loads, and the file of its store."""
    folder = tmp_path_factory.mktemp("verify")
    params = {"store": str(folder / "store"), "store_gb": 0.5, "verify": "off"}
    with Serving(make(TINY, ROOT / ".run" / "models"), folder / "log", params, ONE_THREAD) as running:
        running.wait_until_ready()
        (file,) = (folder / "store").glob("*.dat")
        yield running, file


def verify(serving: Serving, *arguments: str) -> tuple[int, dict[str, Any]]:
    words = ("--json", "--words", "70", "--max-tokens", "8")
    run = [*command(serving, PROMPTS), *words, *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def before_a_clear(serving: Serving, act: Callable[[], None]) -> Iterator[str]:
    """The URL of the LMCache server's front end, as far as `xkv verify` uses it, where `act` goes before a clear."""

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on("GET")

        def do_POST(self) -> None:
            act()
            self.pass_on("POST")

        def pass_on(self, method: str) -> None:
            answer = HTTP.request(method, serving.server_url(self.path))
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as front:
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{front.server_port}"
        finally:
            front.shutdown()
            thread.join()


def blank_every_slot(file: Path) -> None:
    """All that is stored reads as zeros from now on; the manifests are as they were."""
    with file.open("rb") as header:
        slots_offset = int.from_bytes(header.read(88)[80:], "little")
    span = ("--offset", str(slots_offset), "--length", str(file.stat().st_size - slots_offset))
    subprocess.run(["fallocate", "--punch-hole", *span, str(file)], check=True)


@pytest.mark.vllm
@pytest.mark.lmcache
@pytest.mark.timeout(1200)
def test_right_answers_are_told_from_wrong_ones(serving: tuple[Serving, Path]) -> None:
    running, file = serving
    code, report = verify(running)
    assert (code, report["same"], report["prompts_from_a_cache"]) == (0, PROMPTS, PROMPTS), report
    loaded = running.l2_objects_loaded()
    assert loaded >= PROMPTS, "from the second tier, not from memory"
    assert report["tokens_from_lmcache"] > 0 and not report["controls_from_a_cache"]

    with before_a_clear(running, lambda: blank_every_slot(file)) as url:
        code, report = verify(running, "--clear-l1", url)
    assert running.l2_objects_loaded() > loaded
    assert (code, report["because_of_the_cache"], report["same"]) == (1, PROMPTS, 0), report
    assert len(report["differences"]) == PROMPTS

    too_short = ("--words", "5")
    code, report = verify(running, *too_short)
    assert (code, report["missed"], report["used"]) == (1, PROMPTS, False), "no hit proves nothing"


@pytest.mark.parametrize(
    ("controls", "cached", "verdict"),
    [
        ([(1, 2), (1, 2)], (1, 2), "same"),
        ([(1, 2), (1, 2)], (1, 3), "cache"),
        ([(1, 2), (1, 4)], (1, 3), "engine"),
        ([(1, 2), (1, 4)], (1, 2), "engine"),
        ([(1, 2), (1, 2), (1, 3)], (1, 3), "engine"),
    ],
)
def test_who_is_to_blame(controls: list[tuple[int, ...]], cached: tuple[int, ...], verdict: str) -> None:
    answers = [Answer(tokens, 0) for tokens in controls]
    assert Outcome("prompt", answers, Answer(cached, 10)).verdict == verdict
    assert Outcome("prompt", answers, Answer(cached, None)).verdict == verdict, "vLLM does not say"
    same = {*controls, cached} == {(1, 2)}
    assert Outcome("prompt", answers, Answer(cached, 0)).verdict == ("missed" if same else "engine")


def test_a_server_that_is_not_there_is_named() -> None:
    run = [sys.executable, "-m", "xkv_lmcache.cli", "verify", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "http://127.0.0.1:1/v1/models cannot be reached: [Errno 111] Connection refused" in done.stderr
