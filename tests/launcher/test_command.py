"""Commands from settings: golden arguments, and what the launcher understands of a vLLM command."""

from __future__ import annotations

import json

import pytest

from xkv_lmcache_autostart.command import (
    VllmCommand,
    kv_transfer_config,
    l2_adapter,
    server_argv,
    vllm_problems,
    with_transfer_config,
)
from xkv_lmcache_autostart.settings import Settings, load


def settings(**values: str) -> Settings:
    return load({f"LMC_{name}": text for name, text in values.items()}, {}).settings


def test_the_servers_arguments() -> None:
    argv = server_argv(
        settings(L1_GB="120", XKV_STORE="/dev/nvme1n1,/dev/nvme2n1", XKV_FRAG="131072"),
        "/usr/bin/python3",
        accelerator=True,
    )
    assert argv == [
        "/usr/bin/python3",
        "-m",
        "lmcache.v1.multiprocess.http_server",
        *("--host", "127.0.0.1"),
        *("--port", "6555"),
        *("--http-host", "127.0.0.1"),
        *("--http-port", "8080"),
        *("--l1-size-gb", "120"),
        *("--eviction-policy", "LRU"),
        *("--chunk-size", "256"),
        *("--hash-algorithm", "blake3"),
        *("--worker-registration-grace-seconds", "604800"),
        "--l2-adapter",
        (
            '{"type":"native_plugin","module_path":"xkv_lmcache","class_name":"XkvL2Connector",'
            '"adapter_params":{"store":"/dev/nvme1n1,/dev/nvme2n1","fragment_bytes":131072}}'
        ),
    ]


@pytest.mark.parametrize(
    ("mode", "accelerator", "argument"),
    [
        (None, True, None),
        (None, False, "auto"),
        ("lmcache_driven", False, "lmcache_driven"),
        ("engine_driven", True, "engine_driven"),
    ],
)
def test_the_transfer_mode(mode: str | None, accelerator: bool, argument: str | None) -> None:
    argv = server_argv(
        settings(**({"TRANSFER_MODE": mode} if mode else {})), "python3", accelerator=accelerator
    )
    found = argv[argv.index("--supported-transfer-mode") + 1] if "--supported-transfer-mode" in argv else None
    assert found == argument


def test_further_adapters_and_arguments_come_last() -> None:
    argv = server_argv(
        settings(L2_EXTRA='[{"type":"fs","base_path":"/x"},{"type":"s3"}]', EXTRA_ARGS="--max-workers 2"),
        "python3",
        accelerator=True,
    )
    adapters = [json.loads(argv[at + 1]) for at, word in enumerate(argv) if word == "--l2-adapter"]
    assert [adapter["type"] for adapter in adapters] == ["native_plugin", "fs", "s3"]
    assert argv[-2:] == ["--max-workers", "2"]


def test_a_size_is_written_without_exponent() -> None:
    argv = server_argv(settings(L1_GB="512MiB"), "python3", accelerator=True)
    assert argv[argv.index("--l1-size-gb") + 1] == "0.5"
    argv = server_argv(settings(L1_GB="20000B"), "python3", accelerator=True)
    assert argv[argv.index("--l1-size-gb") + 1] == "0.000018626"


def test_the_adapter_spells_only_what_is_set() -> None:
    assert l2_adapter(settings())["adapter_params"] == {}
    assert l2_adapter(settings(XKV_PENDING_MB="2GiB", XKV_PARAMS='{"direct_io":"off"}'))[
        "adapter_params"
    ] == {
        "max_pending_store_mb": 2048.0,
        "direct_io": "off",
    }


def test_the_transfer_config() -> None:
    assert kv_transfer_config(settings(HOST="0.0.0.0", PORT="7000", MQ_TIMEOUT_S="7.5")) == {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": 7000,
            "lmcache.mp.mq_timeout": 7.5,
            "lmcache.mp.heartbeat_interval": 2,
        },
    }


PLAIN = VllmCommand(block_size=None, lora=False, transfer_config=False)
OWN = VllmCommand(block_size=None, lora=False, transfer_config=True)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("vllm serve m", PLAIN),
        ("/opt/venv/bin/vllm serve m", PLAIN),
        ("vllm serve", PLAIN),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", PLAIN),
        ("/usr/bin/python3.12 -u -X dev -W ignore -m vllm.entrypoints.openai.api_server", PLAIN),
        ("python -m vllm.entrypoints.cli.main serve m", PLAIN),
        ("vllm serve m --kv-transfer-config {}", OWN),
        ("vllm serve m --kv-transfer-config={}", OWN),
        ("vllm serve m --kv_transfer_config {}", OWN),
        ("vllm serve m --kv-transfer-config.kv_connector=X", OWN),
        ("vllm serve m --kv-transfer {}", OWN),
        ("vllm serve m --kv-events-config {}", PLAIN),
        ("vllm serve m --kv-cache-dtype fp8", PLAIN),
        ("vllm serve m --block-size 16", VllmCommand(16, False, False)),
        ("vllm serve m --block_size=32 --enable-lora", VllmCommand(32, True, False)),
        ("vllm serve m --block-size 16 --block-size 64", VllmCommand(64, False, False)),
        ("vllm serve m --enable_lora", VllmCommand(None, True, False)),
        ("vllm bench serve", None),
        ("vllm", None),
        ("python3 serve.py -m vllm.entrypoints.openai.api_server", None),
        ("python3 -m http.server", None),
        ("python3", None),
        ("sh -c vllm", None),
        ("echo vllm serve", None),
    ],
)
def test_vllm_commands_are_recognised(command: str, found: VllmCommand | None) -> None:
    assert VllmCommand.parse(command.split()) == found


def test_a_transfer_config_in_a_config_file_counts() -> None:
    files = {"a.yaml": "model: m\nkv-transfer-config: '{}'\n", "b.yaml": "model: m\n"}
    for name, own in (("a.yaml", True), ("b.yaml", False)):
        vllm = VllmCommand.parse(["vllm", "serve", "--config", name], files.__getitem__)
        assert vllm is not None
        assert vllm.transfer_config is own


def test_the_transfer_config_is_added_where_there_is_none() -> None:
    command = ["vllm", "serve", "m"]
    added = with_transfer_config(command, settings(), PLAIN)
    assert added[:3] == command
    assert added[3] == "--kv-transfer-config"
    assert json.loads(added[4]) == kv_transfer_config(settings())
    assert with_transfer_config(command, settings(), OWN) == command
    assert with_transfer_config(command, settings(INJECT="0"), PLAIN) == command
    assert with_transfer_config(["sleep", "1"], settings(), None) == ["sleep", "1"]


@pytest.mark.parametrize(
    ("chunk", "block_size", "accelerator", "message"),
    [
        ("256", None, False, None),
        ("128", None, False, None),
        (
            "100",
            None,
            False,
            "LMC_CHUNK='100' is no multiple of vLLM's block size on a CPU, 128; set it to 128",
        ),
        ("300", None, False, "set it to 256 or give the command a --block-size that divides it"),
        ("48", 16, False, None),
        ("40", 16, False, "LMC_CHUNK='40' is no multiple of the command's --block-size, 16; set it to 32"),
        ("256", 48, True, "is no multiple of the command's --block-size, 48; set it to 240"),
        ("100", None, True, None),
    ],
)
def test_the_chunk_fits_vllms_blocks(
    chunk: str, block_size: int | None, accelerator: bool, message: str | None
) -> None:
    vllm = VllmCommand(block_size, lora=False, transfer_config=False)
    problems = [
        str(problem) for problem in vllm_problems(settings(CHUNK=chunk), vllm, accelerator=accelerator)
    ]
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_lora_is_refused_unless_allowed() -> None:
    lora = VllmCommand(None, lora=True, transfer_config=False)
    (problem,) = vllm_problems(settings(), lora, accelerator=True)
    assert "LMC_ALLOW_LORA=1" in str(problem)
    assert vllm_problems(settings(ALLOW_LORA="1"), lora, accelerator=True) == []
    assert vllm_problems(settings(INJECT="0"), lora, accelerator=True) == []
    assert vllm_problems(settings(), None, accelerator=True) == []
