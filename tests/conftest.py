"""What all tests share."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends import Backend

# A shell that runs the tests in the background has them ignore these; what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Whatever a test starts: nothing is reported, nothing is fetched.
os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

LoopDevices = Callable[[int, int], list[Path]]


@pytest.fixture
def loop_devices(tmp_path: Path) -> Iterator[LoopDevices]:
    """Makes loop block devices: `loop_devices(count, bytes_each)` returns their paths, detached after the test."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    attached: list[Path] = []

    def make(count: int, size: int) -> list[Path]:
        for _ in range(count):
            backing = tmp_path / f"drive-{len(attached)}.img"
            with backing.open("wb") as file:
                file.truncate(size)
            command = ["losetup", "--find", "--show", "--direct-io=on", str(backing)]
            attached.append(
                Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
            )
        return list(attached)

    yield make
    for device in attached:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


@pytest.fixture(params=["embedded", "gateway", "gateway, sharing"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The way to a store: each test runs once with a store in the connector's process, once through a gateway, and once
    through a gateway whose drives the connector reads itself."""
    kind, _, sharing = request.param.partition(", ")
    backend = Backend(kind, sharing=bool(sharing))
    yield backend
    backend.close()
