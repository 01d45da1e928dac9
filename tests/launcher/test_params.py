"""The adapter parameters as the connector takes them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launcher.harness import environment
from xkv_lmcache.params import AdapterParams, ParamsError


def problems(raw: dict[str, object]) -> list[str]:
    with pytest.raises(ParamsError) as error:
        AdapterParams.parse(raw)
    assert isinstance(error.value, ValueError)
    return [str(problem) for problem in error.value.problems]


def test_nothing_set_is_the_default_store() -> None:
    params = AdapterParams.parse({})
    assert params.defaulted
    assert params.mode == "embedded"
    assert params.store_paths == ["/var/lib/xkv"]
    assert params.store_gb == 16.0
    assert params.wanted_fragment_bytes is None
    assert params.slot_memory_bytes == 1024 * 131072


@pytest.mark.parametrize(
    ("store", "paths"),
    [
        ("/a", ["/a"]),
        ("/a,/b", ["/a", "/b"]),
        (" /a , /b ", ["/a", "/b"]),
        (["/a,b", "/c"], ["/a,b", "/c"]),
        ("relative/path", ["relative/path"]),
    ],
)
def test_paths_of_the_store(store: object, paths: list[str]) -> None:
    params = AdapterParams.parse({"store": store})
    assert params.store_paths == paths
    assert not params.defaulted


@pytest.mark.parametrize("store", ["", " ", "/a,", [], [""], ["/a", "/a"], "/a\0b", "~", ["/a", 1], 7, {}])
def test_paths_that_are_refused(store: object) -> None:
    (problem,) = problems({"store": store})
    assert problem.startswith("store=")
    assert ";" in problem, "the message names a cure"


def test_every_error_is_reported_at_once() -> None:
    found = problems(
        {
            "fragment_bytes": 100,
            "verify": "none",
            "store_gb": 0,
            "frag": 1,
            "port": 0,
            "load_deadline_s": 600,
        }
    )
    keys = {problem.partition("=")[0] for problem in found}
    assert keys == {"fragment_bytes", "verify", "store_gb", "frag", "port", "load_deadline_s"}
    assert len(found) == 6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"store": "/a", "host": "h"},
            "host='h' chooses a gateway, but store='/a' is set too; drop one of them",
        ),
        ({"shm_dir": "/shm"}, "shm_dir='/shm' is for a gateway, but neither host nor port is set"),
        ({"token_file": "/t"}, "token_file='/t' is for a gateway, but neither host nor port is set"),
        ({"metrics_host": "h"}, "metrics_host='h' is where metrics_port listens, but that is not set"),
        ({"store_deadline_s": 300}, "store_deadline_s=300 reaches LMCache's read lock"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s=inf is not a number of seconds"),
        ({"batch-slots": 1}, "batch-slots=1 is no parameter; did you mean batch_slots?"),
        ({"zzz": 1}, "zzz=1 is no parameter; remove it (there are store, "),
        ({"copy_threads": True}, "copy_threads=True is not a whole number from 1 to 256"),
        ({"namespace": "\ud800"}, "namespace='\\ud800' holds characters that UTF-8 cannot encode"),
    ],
)
def test_messages(raw: dict[str, object], message: str) -> None:
    (problem,) = problems(raw)
    assert problem.startswith(message)


def test_params_need_no_native_module() -> None:
    """The launcher's help and messages must work where the native module is missing or broken."""
    code = (
        "import sys; sys.modules['xkv_lmcache._native'] = None\n"
        "from xkv_lmcache.params import AdapterParams\n"
        "print(AdapterParams.parse({}).mode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("embedded\n", "")
