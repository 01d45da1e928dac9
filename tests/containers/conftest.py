"""`make containers` builds the images and runs these; nothing else does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.model import TINY, make
from demo.stack import ROOT
from tests.containers.podman import USER, podman


@pytest.fixture(scope="session", autouse=True)
def engine() -> Iterator[None]:
    """Podman; and in the end none of our containers."""
    if os.geteuid() != 0 or not (shutil.which("podman") and shutil.which("runc")):
        pytest.fail("needs root, podman and runc: `make containers` brings them")
    yield
    assert podman("ps", "--all", "--filter", "name=^xkv-test-", "--format", "{{.Names}}") == ""


@pytest.fixture(scope="session")
def model() -> Path:
    """The random Llama of `make run`, which the containers' user may read."""
    folder = make(TINY, ROOT / ".run" / "models")
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


class SharedMemory:
    """What the containers' user has in /dev/shm."""

    def __init__(self) -> None:
        self._before = self._ours()

    @staticmethod
    def _ours() -> set[str]:
        return {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == USER}

    def left(self) -> set[str]:
        """Names that were not there at the start of the test."""
        return self._ours() - self._before

    def forget_semaphores(self) -> None:
        """Removes what vLLM leaves where it is process 1: its resource tracker, which would unlink them, dies with it."""
        for name in self.left():
            if name.startswith("sem.mp-"):
                Path("/dev/shm", name).unlink()


@pytest.fixture
def shared_memory() -> Iterator[SharedMemory]:
    """Fails a test that leaves something in /dev/shm."""
    memory = SharedMemory()
    yield memory
    assert memory.left() == set()
