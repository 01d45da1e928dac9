"""`--check` on machines that lack something: the right lines, the right exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess
from tests.launcher.harness import COMMAND, REPOSITORY, STANDIN, environment, free_ports

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes mounts, limits or users, which needs root")


def values(folder: Path, **more: str) -> dict[str, str]:
    """Settings of a small server that this machine can run."""
    port, http_port = free_ports(2)
    return {
        "LMC_PORT": str(port),
        "LMC_HTTP_PORT": str(http_port),
        "LMC_L1_GB": "0.1",
        "LMC_XKV_STORE": str(folder / "store"),
        "LMC_XKV_STORE_GB": "0.25",
        "LMC_XKV_SLOTS": "64",
        "LMC_XKV_NAMESPACE": "n",
        **more,
    }


def check(settings: dict[str, str], prefix: Sequence[str] = ()) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and for each subject its level and text."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "xkv_lmcache_autostart", "--check", "--json"],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    found = {finding["subject"]: (finding["level"], finding["text"]) for finding in report["findings"]}
    assert report["worst"] == {0: "ok", 4: "warning", 1: "failure"}[done.returncode]
    return done.returncode, found


def not_ok(found: dict[str, tuple[str, str]]) -> set[str]:
    return {subject for subject, (level, _) in found.items() if level != "ok"}


def in_mounts_of_its_own(script: str) -> list[str]:
    """A prefix that runs `script` in a mount namespace before the command."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{script}\nexec "$@"', "sh"]


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[tuple[list[str], Path]]:
    """A prefix that runs a command in a cgroup with this limit of memory, of either version; and its folder."""
    base = Path("/sys/fs/cgroup/memory")
    files = ("memory.limit_in_bytes", "tasks")
    if not base.is_dir():
        base, files = Path("/sys/fs/cgroup"), ("memory.max", "cgroup.procs")
    folder = base / f"xkv-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / files[0]).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield ["sh", "-ec", f'echo $$ > {folder}/{files[1]}; exec "$@"', "sh"], folder
    finally:
        folder.rmdir()


@needs_root
def test_a_memory_limit_too_small_for_l1(tmp_path: Path) -> None:
    with memory_cgroup(2**30) as (prefix, folder):
        code, found = check(values(tmp_path, LMC_L1_GB="2"), prefix)
        fits, _ = check(values(tmp_path, LMC_L1_GB="0.1"), prefix)
    assert (code, fits) == (1, 0)
    level, text = found["memory"]
    assert level == "failure"
    assert f"rest of the memory limit of cgroup {folder}" in text
    assert "; set LMC_L1_GB=0." in text
    assert not_ok(found) == {"memory"}


def refused_io_uring() -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("needs strace; scripts/setup.py test-tools brings it")
    inject = "inject=io_uring_setup:error=EPERM"
    return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=io_uring_setup", "-e", inject]


def test_io_uring_refused(tmp_path: Path) -> None:
    code, found = check(values(tmp_path), refused_io_uring())
    assert code == 4
    assert not_ok(found) == {"io_uring"}
    assert found["io_uring"][1].startswith("it is forbidden, by the container's seccomp profile")
    code, found = check(values(tmp_path, LMC_XKV_PARAMS='{"io_engine":"uring"}'), refused_io_uring())
    assert code == 1
    assert found["io_uring"][0] == "failure"
    code, found = check(values(tmp_path, LMC_XKV_PARAMS='{"io_engine":"pool"}'), refused_io_uring())
    assert code == 0


@needs_root
def test_a_full_shared_memory(tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=1M tmpfs /dev/shm; cat /dev/zero > /dev/shm/x 2>/dev/null || true"
    code, found = check(values(tmp_path), in_mounts_of_its_own(fill))
    assert code == 4
    assert not_ok(found) == {"/dev/shm"}
    assert found["/dev/shm"][1].startswith("0 of 1 MiB are free in /dev/shm: vLLM's processes")
    small = "mount -t tmpfs -o size=512M tmpfs /dev/shm"
    pool = values(tmp_path, LMC_L1_GB="1", LMC_EXTRA_ARGS="--shm-name pool")
    code, found = check(pool, in_mounts_of_its_own(small))
    assert code == 4
    assert "too little for L1 in shared memory (1 GiB, --shm-name)" in found["/dev/shm"][1]


@needs_root
def test_little_lockable_memory(tmp_path: Path) -> None:
    code, found = check(values(tmp_path), ["prlimit", "--memlock=65536:65536"])
    assert code == 4
    assert not_ok(found) == {"memlock"}
    assert found["memlock"][1].startswith("locked memory is limited to 64 KiB")


def nobody() -> list[str]:
    """A prefix that runs a command as a user without rights and without HOME, on a root that is read only."""
    script = ""
    base = sys.base_prefix
    if any(not parent.stat().st_mode & 0o001 for parent in Path(base).parents):
        # The interpreter is in somebody's home; show it to everybody, in these mounts alone.
        home = Path(base).parents[-2]
        script += f"""
            mount -t tmpfs tmpfs /mnt; mkdir /mnt/base; mount --bind {base} /mnt/base
            mount -t tmpfs -o mode=755 tmpfs {home}; mkdir -p {base}; mount --bind /mnt/base {base}
        """
    script += "mount -o remount,bind,ro /"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    return [*in_mounts_of_its_own(script), *user, "env", "--unset=HOME"]


@needs_root
def test_a_user_without_rights_home_or_a_root_to_write_to(tmp_path: Path) -> None:
    code, found = check(values(Path("/var/lib/xkv-test")), nobody())
    assert code == 1
    assert not_ok(found) == {"store"}
    assert "/var/lib" in found["store"][1]
    assert "cannot be opened for writing" in found["store"][1]

    writable = Path(f"/dev/shm/xkv-test-{uuid.uuid4().hex[:8]}")
    writable.mkdir(mode=0o777)
    try:
        writable.chmod(0o777)
        code, found = check(values(writable), nobody())
        assert code == 0, found
        settings = values(writable) | {"LMC_ENABLE": "1"}
        done = subprocess.run(
            [
                *nobody(),
                sys.executable,
                "-m",
                "xkv_lmcache_autostart",
                "--",
                sys.executable,
                COMMAND,
                "exit=7",
            ],
            env=environment(**settings) | {"PYTHONPATH": f"{STANDIN}{os.pathsep}{REPOSITORY}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 7, done.stderr
    finally:
        shutil.rmtree(writable)


def test_the_model_of_a_derived_namespace(tmp_path: Path) -> None:
    settings = values(tmp_path, LMC_XKV_NAMESPACE="auto", LMC_MODEL=str(tmp_path / "none"))
    code, found = check(settings)
    assert code == 1
    assert not_ok(found) == {"namespace"}
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.json").write_text("{}")
    (tmp_path / "none/model.bin").write_text("x")
    code, found = check(settings)
    assert code == 0
    assert found["namespace"][1].endswith(f", of 1 weight files in {tmp_path}/none")


def gateway_values(folder: Path, gateway: GatewayProcess, **more: str) -> dict[str, str]:
    settings = values(folder, LMC_XKV_HOST=gateway.host, LMC_XKV_PORT=str(gateway.port), **more)
    settings["LMC_XKV_SHM_DIR"] = str(gateway.settings["shm_dir"])
    del settings["LMC_XKV_STORE"], settings["LMC_XKV_STORE_GB"]
    return settings


def test_a_gateway_that_answers(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a long and secret token\n")
    token.chmod(0o600)
    with GatewayProcess(tmp_path / "store", token_file=token) as gateway:
        code, found = check(gateway_values(tmp_path, gateway, LMC_XKV_TOKEN_FILE=str(token)))
        assert code == 0, found
        assert "store" not in found, "it is the gateway's to examine"
        assert found["gateway"][1].startswith(f"gateway 127.0.0.1:{gateway.port} answers: store of 1 drive")

        code, found = check(gateway_values(tmp_path, gateway))
        assert (code, not_ok(found)) == (1, {"gateway"})
        assert "the token is missing or wrong" in found["gateway"][1]

        wrong = tmp_path / "wrong"
        wrong.write_text("another\n")
        wrong.chmod(0o644)
        code, found = check(gateway_values(tmp_path, gateway, LMC_XKV_TOKEN_FILE=str(wrong)))
        assert (code, not_ok(found)) == (1, {"gateway", "token"})
        assert "can be read by every user" in found["token"][1]
        assert "another" not in json.dumps(found).replace("another user", "")

        other = gateway_values(tmp_path, gateway, LMC_XKV_TOKEN_FILE=str(token), LMC_XKV_FRAG="65536")
        code, found = check(other)
        assert (code, not_ok(found)) == (1, {"gateway"})
        assert "fragment_bytes=65536 is not the 4096 of the store" in found["gateway"][1]


def test_a_gateway_that_is_not_there_yet(tmp_path: Path) -> None:
    settings = values(tmp_path, LMC_XKV_PORT=str(free_ports(1)[0]))
    del settings["LMC_XKV_STORE"], settings["LMC_XKV_STORE_GB"]
    code, found = check(settings)
    assert (code, not_ok(found)) == (4, {"gateway"})
    assert "until it is there, everything is a miss" in found["gateway"][1]


@pytest.mark.parametrize(
    ("setting", "subject", "message"),
    [
        ("LMC_XKV_TOKEN_FILE", "token", "cannot be read (No such file or directory)"),
        ("LMC_XKV_SHM_DIR", "shm_dir", "is no folder here; name the one that is shared with the gateway"),
    ],
)
def test_what_the_gateway_needs_here(tmp_path: Path, setting: str, subject: str, message: str) -> None:
    settings = values(tmp_path, LMC_XKV_PORT=str(free_ports(1)[0]), **{setting: str(tmp_path / "none")})
    del settings["LMC_XKV_STORE"], settings["LMC_XKV_STORE_GB"]
    code, found = check(settings)
    assert code == 1
    assert found[subject][0] == "failure"
    assert message in found[subject][1]
