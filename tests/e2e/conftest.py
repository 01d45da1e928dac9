"""What the end-to-end tests share."""

from pathlib import Path

import pytest

from demo.model import TINY, make
from demo.stack import ROOT


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The random Llama of `make run`, made once per checkout."""
    return make(TINY, ROOT / ".run" / "models")
