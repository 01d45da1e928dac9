"""What the children see, and what is shown of it."""

from __future__ import annotations

import pytest

from xkv_lmcache_autostart import environment
from xkv_lmcache_autostart.settings import load

OUTER = {
    "PATH": "/bin",
    "HOME": "/root",
    "LD_LIBRARY_PATH": "/lib",
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_API_KEY": "hunter2",
    "https_proxy": "http://user:hunter2@proxy:3128",
    "OTEL_SERVICE_NAME": "kv",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter2",
    "LMCACHE_LOG_LEVEL": "DEBUG",
    "LMCACHE_TRACK_USAGE": "true",
    "PYTHONPATH": "/x",
    "LMC_L1_GB": "1",
    "HF_TOKEN": "hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "DATABASE_URL": "postgres://u:hunter2@db/x",
}


def test_the_server_sees_a_whitelist() -> None:
    seen = environment.server_environment(OUTER, load({}, {}).settings)
    assert seen == {
        "PATH": "/bin",
        "HOME": "/root",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "https_proxy": "http://user:hunter2@proxy:3128",
        "OTEL_SERVICE_NAME": "kv",
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "PYTHONPATH": "/x",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    assert environment.withheld_secrets(OUTER, load({}, {}).settings) == [
        "NVIDIA_API_KEY",
        "OTEL_EXPORTER_OTLP_HEADERS",
    ]


def test_more_is_passed_by_name_or_pattern() -> None:
    settings = load({"LMC_PASS_ENV": "AWS_*,NVIDIA_API_KEY"}, {}).settings
    seen = environment.server_environment(OUTER, settings)
    assert seen["AWS_SECRET_ACCESS_KEY"] == "hunter2"
    assert seen["NVIDIA_API_KEY"] == "hunter2"
    assert "HF_TOKEN" not in seen


def test_the_command_sees_everything_and_the_safe_defaults() -> None:
    seen = environment.command_environment(OUTER, load({}, {}).settings)
    assert OUTER.items() - seen.items() == {("LMCACHE_TRACK_USAGE", "true")}
    assert (seen["VLLM_NO_USAGE_STATS"], seen["LMCACHE_TRACK_USAGE"], seen["PYTHONHASHSEED"]) == (
        "1",
        "false",
        "0",
    )


def test_telemetry_and_the_hash_seed_can_be_chosen() -> None:
    settings = load({"LMC_TELEMETRY": "1"}, {}).settings
    seen = environment.server_environment({**OUTER, "PYTHONHASHSEED": "7"}, settings)
    assert "VLLM_NO_USAGE_STATS" not in seen
    assert "DO_NOT_TRACK" not in seen
    assert (seen["LMCACHE_TRACK_USAGE"], seen["PYTHONHASHSEED"]) == ("true", "7")


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "TOKEN",
        "API_KEY",
        "aws_secret_access_key",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "api-key",
        "apiKey",
        "auth",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert environment.is_secret(name)


@pytest.mark.parametrize(
    "name", ["PWD", "PATH", "TOKENIZERS_PARALLELISM", "HOME", "max-num-batched-tokens-x", "KEYBOARD"]
)
def test_names_of_no_secrets(name: str) -> None:
    assert not environment.is_secret(name)


def test_what_is_shown_is_masked() -> None:
    shown = environment.masked(OUTER)
    assert "hunter2" not in str(shown)
    assert shown["https_proxy"] == "http://***@proxy:3128"
    assert shown["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["vllm", "--api-key", "hunter2", "--port", "1"], ["vllm", "--api-key", "***", "--port", "1"]),
        (["vllm", "--api-key=hunter2"], ["vllm", "--api-key=***"]),
        (["x", '{"a":{"secret_key":"hunter2","b":1}}'], ["x", '{"a":{"secret_key":"***","b":1}}']),
        (["x", '--c={"token":"hunter2"}'], ["x", '--c={"token":"***"}']),
        (["x", '[{"password":"hunter2"}]'], ["x", '[{"password":"***"}]']),
        (["x", "redis://me:hunter2@host/0"], ["x", "redis://***@host/0"]),
        (["x", "{not json"], ["x", "{not json"]),
        (["--token", "--port", "1"], ["--token", "--port", "1"]),
    ],
)
def test_arguments_are_masked(argv: list[str], shown: list[str]) -> None:
    assert environment.masked_argv(argv) == shown
