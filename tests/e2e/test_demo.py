"""What `make run` starts ends with it, however it ends; and it does not report success when a hit is missing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from demo.__main__ import Phase, faults
from demo.stack import CHUNK, ROOT, SERVER_MODULE, Answer, Hits

TOKENS = (1, 2, 3)


def phase(
    name: str, source: str | None, *, l1: int = 0, l2: int = 0, tokens: tuple[int, ...] = TOKENS
) -> Phase:
    answer = Answer(tokens, ttft_s=1.0, prompt_tokens=4 * CHUNK + 10, cached_tokens=(l1 + l2) * CHUNK)
    return Phase(name, source, answer, Hits(4, l1, l2))


GOOD = [phase("cold", None), phase("L1 hit", "L1", l1=4), phase("L2 hit", "L2", l2=4)]


def test_no_fault_when_all_is_well() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (phase("L2 hit", "L2"), "0 objects from L1 and 0 from L2, expected 0 and 4"),
        (phase("L2 hit", "L2", l2=3), "3 from L2, expected 0 and 4"),
        (phase("L2 hit", "L2", l1=4), "4 objects from L1 and 0 from L2, expected 0 and 4"),
        (phase("L2 hit", "L2", l2=4, tokens=(1, 2, 4)), "tokens differ"),
        (phase("cold again", None, l2=4), "4 from L2, expected 0 and 0"),
    ],
)
def test_a_missing_hit_or_another_token_is_a_fault(bad: Phase, said: str) -> None:
    assert any(said in fault and fault.startswith(bad.name) for fault in faults([*GOOD, bad]))


@pytest.mark.lmcache
@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize(
    ("how", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, ["--gateway"]), (signal.SIGKILL, ["--gateway"])]
)
def test_nothing_is_left_running(how: signal.Signals, flags: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "demo",
        "--folder",
        str(tmp_path),
        "--models",
        str(ROOT / ".run" / "models"),
        *flags,
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, start_new_session=True
    )
    try:
        assert demo.stdout is not None
        assert any("the LMCache server is ready" in line for line in demo.stdout)
        started = psutil.Process(demo.pid).children(recursive=True)
        commands = [process.cmdline() for process in started]
        assert any(SERVER_MODULE in command for command in commands)
        assert any("gateway" in command for command in commands) == bool(flags)
        demo.send_signal(how)
        assert demo.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
        _, alive = psutil.wait_procs(started, timeout=60)
        assert alive == []
    finally:
        demo.kill()
        demo.communicate()
