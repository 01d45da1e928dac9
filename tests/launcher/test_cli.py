"""The command line, from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launcher.harness import COMMAND, STANDIN, Plan, await_value, environment, free_ports, run


def python_without(folder: Path, *modules: str) -> str:
    """A PYTHONPATH on which importing one of `modules` fails."""
    for module in modules:
        (folder / f"{module}.py").write_text("raise ImportError('not to be imported')")
    return os.pathsep.join([str(folder), environment()["PYTHONPATH"]])


@pytest.mark.parametrize("off", ["", "0", "false", "OFF"])
def test_a_command_without_a_server_imports_nothing(tmp_path: Path, off: str) -> None:
    path = python_without(tmp_path, "click", "pydantic", "structlog", "psutil", "tenacity")
    done = run(
        "--", sys.executable, "-c", "print('ran')", LMC_ENABLE=off, LMC_PORT="nonsense", PYTHONPATH=path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_a_command_takes_the_launchers_place() -> None:
    argv = [sys.executable, "-m", "xkv_lmcache_autostart", "--", "sh", "-c", "echo $$; exit 9"]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=30)
    assert output == f"{process.pid}\n"
    assert process.returncode == 9


def test_a_command_finds_sigpipe_at_its_default() -> None:
    """Python ignores it, which would be handed down: `yes | head` would then never end."""
    done = run("--", "sh", "-c", "(yes; echo $? >&2) | head -n 1")
    assert done.stdout == "y\n"
    assert done.stderr.strip() == str(128 + signal.SIGPIPE)


@pytest.mark.parametrize(
    ("program", "code"), [("/no/such/program", 127), ("/etc/passwd", 126), ("/etc", 126)]
)
def test_a_command_that_cannot_run(program: str, code: int) -> None:
    done = run("--", program)
    assert done.returncode == code
    assert program in done.stderr


@pytest.mark.parametrize(
    ("arguments", "values", "message"),
    [
        ([], {}, "there is nothing to run; give a command after --, or --exec for the server alone"),
        (["--exec", "--", "true"], {}, "--exec runs the server alone"),
        (["--frobnicate"], {}, "No such option"),
        (["--", "true"], {"LMC_ENABLE": "maybe"}, "LMC_ENABLE='maybe' is not a boolean"),
        (["--port", "x", "--", "true"], {}, "--port='x' is not a port"),
        (
            ["--exec"],
            {"LMC_PORT": "tcp://10.0.0.1:80"},
            "LMC_PORT='tcp://10.0.0.1:80' is a Kubernetes service link",
        ),
        (
            ["--", "vllm", "serve", "m", "--block-size", "48"],
            {"LMC_ENABLE": "1"},
            "LMC_CHUNK='256' is no multiple of the command's --block-size, 48; set it to 240",
        ),
        (["--", "vllm", "serve", "m", "--enable-lora"], {"LMC_WAIT_FOR_SERVER": "1"}, "set LMC_ALLOW_LORA=1"),
    ],
)
def test_bad_settings_end_with_2(arguments: list[str], values: dict[str, str], message: str) -> None:
    done = run(*arguments, **values)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_all_errors_come_in_one_go() -> None:
    done = run("--exec", LMC_PORT="x", LMC_L1_GB="'1'", LMC_XKV_PARAMS='{"verify":"no"}')
    assert done.returncode == 2
    assert "3 errors in the settings; nothing was started" in done.stderr
    assert all(name in done.stderr for name in ("LMC_PORT='x'", "LMC_L1_GB=", "LMC_XKV_PARAMS: verify='no'"))


def test_a_machine_that_cannot_run_the_server_ends_with_1(tmp_path: Path) -> None:
    port, http_port = free_ports(2)
    done = run(
        "--exec",
        LMC_L1_GB="1000000",
        LMC_PORT=str(port),
        LMC_HTTP_PORT=str(http_port),
        LMC_XKV_STORE=str(tmp_path),
    )
    assert done.returncode == 1
    assert "the machine cannot run the server as configured; nothing was started" in done.stderr
    assert "L1 of 1000000 GiB (LMC_L1_GB)" in done.stderr


def test_parts_are_printed_for_use_elsewhere() -> None:
    config = json.loads(run("--print", "kv-transfer-config", LMC_PORT="7000").stdout)
    assert config["kv_connector_extra_config"]["lmcache.mp.port"] == 7000
    adapter = json.loads(run("--print", "l2-adapter", LMC_XKV_STORE="/a").stdout)
    assert adapter["adapter_params"] == {"store": "/a"}
    argv = run("--print", "argv", "--l1-gb", "3").stdout
    assert argv.startswith(
        f"{sys.executable} -m lmcache.v1.multiprocess.http_server --host 127.0.0.1 --port 6555"
    )
    assert "--l1-size-gb 3 " in argv
    assert argv.endswith('"adapter_params":{}}\'\n')


def test_a_dry_run_shows_everything_but_secrets() -> None:
    done = run(
        *("--dry-run", "--", "vllm", "serve", "m", "--api-key", "hunter2"),
        LMC_ENABLE="1",
        LMC_XKV_STORE="/a",
        LMC_L2_EXTRA='{"type":"s3","secret_key":"hunter2"}',
        https_proxy="http://me:hunter2@proxy",
        HF_TOKEN="hunter2",
    )
    assert done.returncode == 0
    assert "hunter2" not in done.stdout + done.stderr
    sections = dict(part.split("\n", 1) for part in ("\n" + done.stdout).split("\n# ")[1:])
    assert "-m lmcache.v1.multiprocess.http_server" in sections["server argv"]
    assert '"secret_key":"***"' in sections["server argv"]
    assert json.loads(sections["l2-adapter"])["adapter_params"] == {"store": "/a"}
    assert "https_proxy=http://***@proxy" in sections["server environment"]
    assert "HF_TOKEN" not in sections["server environment"]
    assert "vllm serve m --api-key '***' --kv-transfer-config" in sections["command argv"]
    assert "VLLM_NO_USAGE_STATS=1" in sections["command environment (beyond the launcher's own)"]


def test_the_help_lists_every_setting() -> None:
    from xkv_lmcache_autostart.settings import VARIABLES

    text = run("--help").stdout
    for variable in VARIABLES.values():
        assert f"{variable.option}, {variable.name}\n" in text
        assert variable.param is None or f"sets {variable.param}" in " ".join(text.split())


def test_the_versions() -> None:
    assert run("--version").stdout.splitlines()[0].startswith("xkv-lmcache ")


def test_the_check_has_a_line_for_everything(tmp_path: Path) -> None:
    port, http_port = free_ports(2)
    values = {"LMC_PORT": str(port), "LMC_HTTP_PORT": str(http_port), "LMC_L1_GB": "0.1"}
    values |= {"LMC_XKV_STORE": str(tmp_path / "s"), "LMC_XKV_STORE_GB": "0.25", "LMC_XKV_SLOTS": "64"}
    done = run("--check", **values, LMC_XKV_NAMESPACE="n")
    assert done.returncode == 0, done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 12
    warned = run("--check", **values)
    assert warned.returncode == 4
    assert warned.stdout.startswith("warning  settings: no namespace is set")
    failed = run("--check", "--json", **values | {"LMC_L1_GB": "1000000"})
    assert failed.returncode == 1
    report = json.loads(failed.stdout)
    assert report["worst"] == "failure"
    levels = {finding["subject"]: finding["level"] for finding in report["findings"]}
    assert (levels["memory"], levels["settings"], levels["store"]) == ("failure", "warning", "ok")


def test_exec_becomes_the_server(tmp_path: Path) -> None:
    """Its process, signals and exit code are the server's own (a stand-in's here)."""
    plan = Plan(tmp_path, [], settings={"XKV_STANDIN_STARTS": str(tmp_path / "starts")})
    argv = [*plan.argv[:3], "--exec"]
    with subprocess.Popen(argv, env=plan.environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "stand-in server" in line:
                break
        assert f"process {process.pid}" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_a_command_waits_for_somebody_elses_server(tmp_path: Path) -> None:
    port, http_port = free_ports(2)
    values = {
        "LMC_WAIT_FOR_SERVER": "1",
        "LMC_PORT": str(port),
        "LMC_HTTP_PORT": str(http_port),
        "LMC_WAIT_S": "30",
    }
    argv = [sys.executable, "-m", "xkv_lmcache_autostart", "--", sys.executable, str(COMMAND), "exit=5"]
    with subprocess.Popen(argv, env=environment(**values), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting for the LMCache server" in process.stderr.readline()
        assert process.poll() is None
        server = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1"]
        server += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
        with subprocess.Popen(server, env=environment(PYTHONPATH=str(STANDIN))) as other:
            assert process.wait(timeout=30) == 5
            other.terminate()


def test_nobody_elses_server_comes() -> None:
    port, http_port = free_ports(2)
    done = run(
        *("--", "true"),
        LMC_WAIT_FOR_SERVER="1",
        LMC_PORT=str(port),
        LMC_HTTP_PORT=str(http_port),
        LMC_WAIT_S="1",
    )
    assert done.returncode == 1
    assert "no LMCache server within LMC_WAIT_S=1 seconds" in done.stderr


def test_a_wait_can_be_interrupted_as_pid_1() -> None:
    port, http_port = free_ports(2)
    values = {"LMC_WAIT_FOR_SERVER": "1", "LMC_PORT": str(port), "LMC_HTTP_PORT": str(http_port)}
    argv = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-m",
        "xkv_lmcache_autostart",
        "--",
        "true",
    ]
    with subprocess.Popen(argv, env=environment(**values), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting for the LMCache server" in process.stderr.readline()
        (launcher,) = await_value(lambda: psutil.Process(process.pid).children())
        launcher.terminate()
        assert process.wait(timeout=10) == 143


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--on-server-exit re", {"restart"}),
        ("--xkv-verify f", {"full"}),
        ("--l1-g", {"--l1-gb"}),
        ("cont", {"cont", "container"}),  # a file of that name, too
        ("container s", {"stop", "status"}),
        ("container run --gpus n", {"none"}),
    ],
)
def test_a_shell_completes(words: str, wanted: set[str]) -> None:
    line = f"xkv_lmcache_autostart {words}"
    done = run(
        _XKV_LMCACHE_AUTOSTART_COMPLETE="bash_complete",
        COMP_WORDS=line,
        COMP_CWORD=str(line.count(" ")),
    )
    assert {answer.partition(",")[2] for answer in done.stdout.splitlines()} == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script(shell: str) -> None:
    script = run("--completion", shell).stdout
    assert f"_XKV_LMCACHE_AUTOSTART_COMPLETE={shell}_complete" in script
    assert "xkv_lmcache_autostart" in script


def test_json_is_for_the_check_alone() -> None:
    assert run("--json", "--", "true").returncode == 2
