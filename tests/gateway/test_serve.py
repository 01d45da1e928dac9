"""`xkv gateway serve` as a process: it serves, ends as asked, and refuses what cannot work by name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from demo.gateway import GatewayProcess, free_port
from tests.gateway.command import XKV, environment, xkv
from tests.plugin.client import Client, contents

NOBODY = 65534


def wait_for(what: str, path: Path, seconds: float = 60) -> str:
    """Returns the content of a growing file once it holds `what`."""
    deadline = time.monotonic() + seconds
    while what not in (text := path.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"no {what!r} within {seconds} s:\n{text}"
        time.sleep(0.01)
    return text


def test_what_is_stored_through_it_opens_embedded_and_back(tmp_path: Path) -> None:
    objects = {f"key-{i}": contents(i, 1 + 3000 * i) for i in range(20)}
    sizes = {key: len(data) for key, data in objects.items()}
    store = tmp_path / "store"
    gateway = GatewayProcess(store)
    with gateway:
        with Client(**gateway.params) as client:
            assert client.set(objects)
            (session,) = gateway.status()["sessions"]
            assert session["bytes_written"] >= sum(sizes.values())
        assert gateway.end() == 0
        with Client(store=str(store)) as client:
            assert client.get(sizes) == objects
            assert client.set({"embedded": b"x" * 5000})
        gateway.start()
        with Client(**gateway.params) as client:
            assert client.get({"embedded": 5000, **sizes}) == {"embedded": b"x" * 5000, **objects}
    log = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    events = [line["event"] for line in log]
    assert [event for event in events if event.startswith("session")][:2] == [
        "session opened",
        "session ended",
    ]
    assert events.count("closed") == 1
    serving = next(line for line in log if line["event"].startswith("serving a store"))
    assert serving["listen"] == f"127.0.0.1:{gateway.port}" and str(store) in serving["event"]
    assert serving["logger"] == "xkv-gateway" and serving["level"] == "info" and serving["timestamp"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_sessions_commits_and_closes(number: signal.Signals, tmp_path: Path) -> None:
    objects = {f"key-{i}": contents(i, 5000) for i in range(50)}
    with GatewayProcess(tmp_path / "store") as gateway, Client(**gateway.params) as client:
        assert client.set(objects)
        os.kill(gateway.pid, signal.SIGHUP)
        assert len(gateway.status()["sessions"]) == 1, "HUP is ignored"
        started = time.monotonic()
        assert gateway.end(number) == 0
        assert time.monotonic() - started < 8, "nothing held it up"
        text = gateway.log.read_text()
        assert f"{number.name}: ending the sessions" in text and '"closed"' in text
        ended = next(json.loads(line) for line in text.splitlines() if "session ended" in line)
        assert ended["reason"] == "the gateway is closing"
    done = xkv("check", "--json", tmp_path / "store")
    assert done.returncode == 0 and json.loads(done.stdout)["objects"] == len(objects)


def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """The kernel hands process 1 no signal that it neither handles nor blocks."""
    if os.geteuid() != 0:
        pytest.skip("a process namespace needs root")
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    with GatewayProcess(tmp_path / "store", prefix=prefix) as gateway:
        with Client(**gateway.params) as client:
            assert client.set({"key": b"x" * 5000})
        status = Path(f"/proc/{gateway.pid}/status").read_text()
        (numbers,) = (line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        assert numbers[-1] == "1"
        pid, process, gateway.process = gateway.pid, gateway.process, None
        os.kill(pid, signal.SIGTERM)
        assert process is not None and process.wait(30) == 0
        assert '"closed"' in gateway.log.read_text()


@pytest.mark.parametrize("again", [True, False])
def test_a_drive_that_hangs_holds_the_end_up_only_so_long(again: bool, tmp_path: Path) -> None:
    """Closing writes down what was used last; the flush of that takes a minute here. A second signal ends at once."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with GatewayProcess(tmp_path / "store") as gateway:
        with Client(**gateway.params) as client:
            assert client.set({"key": b"x" * 5000})
            assert client.get({"key": 5000}) == {"key": b"x" * 5000}
        slow = "inject=fdatasync:delay_enter=60000000"
        tracer = subprocess.Popen(
            ["strace", "-f", "-p", str(gateway.pid), "-e", "trace=fdatasync", "-e", slow],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
            started = time.monotonic()
            pid, process, gateway.process = gateway.pid, gateway.process, None
            os.kill(pid, signal.SIGTERM)
            wait_for("SIGTERM: ending the sessions", gateway.log)
            if again:
                os.kill(pid, signal.SIGTERM)
            wait_for("SIGTERM again" if again else '"closed"', gateway.log)
            lasted = time.monotonic() - started
            assert lasted < 5 if again else 5 < lasted < 15
            # It leaves, but the tracer still holds the thread that it delays.
            tracer.kill()
            assert process is not None
            assert process.wait(30) == (128 + signal.SIGTERM if again else 0)
        finally:
            tracer.kill()
            tracer.communicate()
        gateway.start()
        with Client(**gateway.params) as client:
            assert client.get({"key": 5000}) == {"key": b"x" * 5000}


@pytest.mark.parametrize("reader", ["stuck", "gone"])
def test_a_log_that_nobody_reads_holds_nothing_up(reader: str, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, bytes(1 << 16))
    # As a shell or a container runtime hands it on.
    os.set_blocking(write_end, True)
    if reader == "gone":
        os.close(read_end)
    gateway = GatewayProcess(tmp_path / "store")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in gateway.settings.items()]
    gateway.process = subprocess.Popen(
        [*XKV, "gateway", "serve", *flags], env=environment(), stderr=write_end
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionError):
                gateway.status()
                break
            assert gateway.process.poll() is None and time.monotonic() < deadline, "it does not come up"
            time.sleep(0.01)
        for _ in range(3):
            with Client(**gateway.params, wait_timeout_s=2) as client:
                assert client.set({"key": b"x" * 5000})
        started = time.monotonic()
        assert gateway.end() == 0
        assert time.monotonic() - started < 8
    finally:
        gateway.__exit__()
        os.close(write_end)
        if reader == "stuck":
            os.close(read_end)


def blocks_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_signal_before_it_serves_ends_it(tmp_path: Path) -> None:
    # It waits for a store that is in use.
    with Client(store=str(tmp_path / "other"), store_gb=0.1):
        waiting = subprocess.Popen(
            [*XKV, "gateway", "serve", "--store", str(tmp_path / "other"), "--port", str(free_port())],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not blocks_term(waiting.pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        waiting.terminate()
        _, log = waiting.communicate(timeout=30)
        assert waiting.returncode == 0 and "before the store was open" in log


def test_a_new_one_starts_at_once_after_kill_9(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        for round_ in range(3):
            with Client(**gateway.params) as client:
                data = {f"{round_}": contents(round_, 10_000)}
                assert client.set(data)
                gateway.restart(signal.SIGKILL)
            with Client(**gateway.params) as client:
                assert client.get({f"{round_}": 10_000}) == data


def test_a_second_gateway_is_refused_by_name(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store") as gateway:
        port = str(gateway.port)
        same_store = xkv("serve", "--store", tmp_path / "store", "--port", str(free_port()))
        assert same_store.returncode == 1
        assert f"{tmp_path}/store/xkv-store.dat: in use by another process" in same_store.stderr
        same_port = xkv("serve", "--store", tmp_path / "other", "--store-gb", "0.1", "--port", port)
        assert same_port.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}; is another gateway running?" in same_port.stderr
        assert gateway.status()["objects"] == 0, "the first is unharmed"


def test_wrong_settings_are_all_named_before_anything_happens(tmp_path: Path) -> None:
    env = environment(XKV_GATEWAY_PORT="http", XKV_GATEWAY_METRICS_PORT="94000")
    done = xkv("serve", "--store", tmp_path / "store", "--depth", "0", env=env)
    assert done.returncode == 2 and not (tmp_path / "store").exists()
    assert "3 errors in the settings; nothing was started" in done.stderr
    for name in ("XKV_GATEWAY_PORT='http'", "XKV_GATEWAY_METRICS_PORT='94000'", "--depth='0'"):
        assert name in done.stderr
    assert xkv("serve", "--no-such-option").returncode == 2


def test_warnings_are_lines_of_the_log(tmp_path: Path) -> None:
    env = environment(XKV_GATEWAY_PROT="1")
    done = xkv("serve", "--store", "/dev/null", "--port", str(free_port()), env=env)
    assert done.returncode == 1
    warning = json.loads(done.stderr.splitlines()[0])
    assert warning["level"] == "warning" and "did you mean XKV_GATEWAY_PORT?" in warning["event"]
    assert "/dev/null: this is a character device" in done.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--shm-dir", "/no/such/folder"], "the shared folder (shm_dir) cannot be used: /no/such/folder"),
        (["--host", "no-such-host.invalid"], "host 'no-such-host.invalid' cannot be resolved"),
        (["--store-gb", "100000000"], "does not fit"),
    ],
)
def test_what_the_machine_refuses_is_exit_code_1(flags: list[str], part: str, tmp_path: Path) -> None:
    base = ["serve", "--store", str(tmp_path / "store"), "--store-gb", "0.1", "--port", str(free_port())]
    done = xkv(*base, *flags)
    assert done.returncode == 1 and part in done.stderr, done.stderr


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    flags = ["--host", "192.0.2.1", "--token-file", str(token), "--store-gb", "0.1"]
    done = xkv("serve", "--store", tmp_path / "store", *flags)
    assert done.returncode == 1 and "cannot listen on 192.0.2.1:5557" in done.stderr


def test_foreign_content_is_left_as_it_is(tmp_path: Path) -> None:
    drive = tmp_path / "drive.img"
    drive.write_bytes(b"important" + bytes(64 << 20))
    before = drive.read_bytes()
    done = xkv("serve", "--store", drive, "--port", str(free_port()))
    assert done.returncode == 1 and f"{drive}: holds data that is not ours" in done.stderr
    assert drive.read_bytes() == before


def test_it_needs_no_root_on_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path("/var/tmp") / tmp_path_factory.mktemp("nobody").name
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, NOBODY, NOBODY)
        prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        # World-writable like /dev/shm, but of this test's own.
        shared = folder / "shm"
        shared.mkdir()
        shared.chmod(0o1777)
        with GatewayProcess(folder / "store", prefix=prefix, shm_dir=str(shared)) as gateway:
            assert Path(f"/proc/{gateway.pid}").stat().st_uid == NOBODY
            with Client(**gateway.params) as client:
                assert client.set({"key": b"x" * 5000})
                assert client.get({"key": 5000}) == {"key": b"x" * 5000}
            assert (folder / "store" / "xkv-store.dat").stat().st_uid == NOBODY
            assert gateway.end() == 0
        elsewhere = xkv("serve", "--store", "/root/xkv-store", "--port", str(free_port()), prefix=prefix)
        assert elsewhere.returncode == 1 and "/root/xkv-store" in elsewhere.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_ipv6_and_names(host: str, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "store", host=host) as gateway:
        with Client(**gateway.params) as client:
            assert client.set({"key": b"x" * 5000})
        addresses = {"::1"} if host == "::1" else resolved("localhost")
        for address in addresses:
            with Client(**{**gateway.params, "host": address}) as client:
                assert client.exists(["key"]) == [True], address
        assert gateway.end() == 0


def resolved(name: str) -> set[str]:
    return {str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}


def test_every_address_of_the_machine_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    wrong = tmp_path / "wrong"
    wrong.write_text("Secret\n")
    port = free_port()
    gateway = GatewayProcess(tmp_path / "store", token_file=str(token))
    gateway.settings.update(host="0.0.0.0,::", port=port)
    gateway.port = port
    with gateway:
        for host in ("127.0.0.1", "::1"):
            at = ["--host", host, "--port", str(port)]
            assert xkv("status", *at, "--token-file", token).returncode == 0
            refused = xkv("status", *at, "--token-file", wrong)
            assert refused.returncode == 1 and "the token is missing or wrong" in refused.stderr
        assert xkv("status", "--port", str(port)).returncode == 1
        with Client(**{**gateway.params, "host": "127.0.0.1"}, token_file=str(token)) as client:
            assert client.set({"key": b"x"})
