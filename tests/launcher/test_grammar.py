"""The grammar of settings as a table: variable and text in, value or message out."""

from __future__ import annotations

import pytest

from xkv_lmcache.problems import SettingsError
from xkv_lmcache_autostart.settings import load

GOOD: list[tuple[str, str, object]] = [
    *[
        ("LMC_ENABLE", text, True)
        for text in ("1", "true", "True", "TRUE", "yes", "Yes", "on", "ON", " 1 ", "1\n")
    ],
    *[("LMC_INJECT", text, False) for text in ("0", "false", "False", "no", "NO", "off", "Off", "\t0")],
    *[("LMC_INJECT", text, True) for text in ("", " ", "\n")],  # empty is unset
    ("LMC_HOST", "localhost", "localhost"),
    ("LMC_HOST", "10.0.0.1", "10.0.0.1"),
    ("LMC_HOST", "0.0.0.0", "0.0.0.0"),
    ("LMC_HOST", "kv-cache.default.svc.cluster.local", "kv-cache.default.svc.cluster.local"),
    ("LMC_HOST", "host_with_underscore", "host_with_underscore"),
    ("LMC_HOST", "", "127.0.0.1"),
    ("LMC_PORT", "1", 1),
    ("LMC_PORT", "65535", 65535),
    ("LMC_PORT", "6556\n", 6556),
    ("LMC_L1_GB", "120", 120.0),
    ("LMC_L1_GB", "0.5", 0.5),
    ("LMC_L1_GB", "512MiB", 0.5),
    ("LMC_L1_GB", "512 MiB", 0.5),
    ("LMC_L1_GB", "1.5GiB", 1.5),
    ("LMC_L1_GB", "1tib", 1024.0),
    ("LMC_L1_GB", "1073741824B", 1.0),
    ("LMC_L1_GB", "20GB", 20e9 / 2**30),
    ("LMC_L1_GB", "500mb", 500e6 / 2**30),
    ("LMC_L1_GB", "1TB", 1e12 / 2**30),
    ("LMC_L1_GB", "1048576KiB", 1.0),
    ("LMC_CHUNK", "256", 256),
    ("LMC_CHUNK", "0128", 128),
    ("LMC_EVICTION", "lru", "LRU"),
    ("LMC_EVICTION", "NOOP", "noop"),
    ("LMC_TRANSFER_MODE", "AUTO", "auto"),
    ("LMC_TRANSFER_MODE", "engine_driven", "engine_driven"),
    ("LMC_TRANSFER_MODE", "lmcache_driven", "lmcache_driven"),
    ("LMC_WAIT_S", "300", 300.0),
    ("LMC_WAIT_S", "0.5", 0.5),
    ("LMC_STOP_S", "0", 0.0),
    ("LMC_ON_SERVER_EXIT", "Exit", "exit"),
    ("LMC_MQ_TIMEOUT_S", "7.5", 7.5),
    ("LMC_EXTRA_ARGS", "--max-workers 2 --instance-id 'a b'", ["--max-workers", "2", "--instance-id", "a b"]),
    ("LMC_EXTRA_ARGS", "--l1-read-ttl-seconds 61", ["--l1-read-ttl-seconds", "61"]),
    ("LMC_EXTRA_ARGS", "--hash-algorithm=sha256_cbor", ["--hash-algorithm=sha256_cbor"]),
    ("LMC_PASS_ENV", "AWS_*, FOO BAR", ["AWS_*", "FOO", "BAR"]),
    ("LMC_L2_EXTRA", '{"type":"fs"}', [{"type": "fs"}]),
    ("LMC_L2_EXTRA", '[{"type":"fs"},{"type":"s3"}]', [{"type": "fs"}, {"type": "s3"}]),
    ("LMC_LOG_FORMAT", "JSON", "json"),
    ("LMC_LOG_LEVEL", "Debug", "debug"),
    ("LMC_TELEMETRY", "on", True),
    ("LMC_XKV_STORE", "/dev/nvme1n1,/dev/nvme2n1", "/dev/nvme1n1,/dev/nvme2n1"),
    ("LMC_XKV_STORE", "/a folder/with 'quotes'", "/a folder/with 'quotes'"),
    ("LMC_XKV_STORE_GB", "1024MiB", 1.0),
    ("LMC_XKV_FRAG", "131072", 131072),
    ("LMC_XKV_FRAG", "128KiB", 131072),
    ("LMC_XKV_FRAG", "1MiB", 1048576),
    ("LMC_XKV_FRAG", "Auto", "auto"),
    ("LMC_XKV_SLOTS", "2048", 2048),
    ("LMC_XKV_COPY_THREADS", "4", 4),
    ("LMC_XKV_COPY_THREADS", "auto", "auto"),
    ("LMC_XKV_VERIFY", "Sample", "sample"),
    ("LMC_XKV_WAIT_S", "2.5", 2.5),
    ("LMC_XKV_LOAD_DEADLINE_S", "599", 599.0),
    ("LMC_XKV_STORE_DEADLINE_S", "299.5", 299.5),
    ("LMC_XKV_REOPEN_S", "1", 1.0),
    ("LMC_XKV_PENDING_MB", "1GiB", 1024.0),
    ("LMC_XKV_PENDING_MB", "2048", 2048.0),
    ("LMC_XKV_NAMESPACE", "llama-3 fp8 é", "llama-3 fp8 é"),
    ("LMC_XKV_NAMESPACE", "auto", "auto"),
    ("LMC_MODEL", "org/model --dtype half", "org/model --dtype half"),
    ("LMC_XKV_STATS_S", "5", 5.0),
    ("LMC_XKV_STATS_PATH", "/tmp/xkv-stats.json", "/tmp/xkv-stats.json"),
    ("LMC_XKV_PARAMS", '{"batch_slots":2048}', {"batch_slots": 2048}),
    ("LMC_XKV_PARAMS", ' { "io_engine" : "pool" } ', {"io_engine": "pool"}),
    ("LMC_XKV_PARAMS", "{}", {}),
]

QUOTED = "has quotes around it"
SERVICE_LINK = "is a Kubernetes service link; set enableServiceLinks: false"

BAD: list[tuple[str, str, str]] = [
    *[
        ("LMC_ENABLE", text, "is not a boolean; write 1/true/yes/on")
        for text in ("2", "y", "t", "enable", "1.0", "-1")
    ],
    *[("LMC_ENABLE", text, QUOTED) for text in ("'1'", '"true"', "''", '""')],
    *[
        (variable, "tcp://10.0.0.1:80", SERVICE_LINK)
        for variable in (
            "LMC_PORT",
            "LMC_HTTP_PORT",
            "LMC_XKV_PORT",
            "LMC_HOST",
            "LMC_CHUNK",
            "LMC_XKV_PARAMS",
        )
    ],
    ("LMC_PORT", "udp://10.0.0.1:80", SERVICE_LINK),
    ("LMC_HOST", "tcp://localhost", "is a URL; write the host alone"),
    ("LMC_HOST", "127.0.0.1:6555", "has a port in it; write the host alone"),
    *[
        ("LMC_HOST", text, "is an IPv6 address, which LMCache's server cannot use")
        for text in ("::1", "[::1]", "fe80::1")
    ],
    ("LMC_HTTP_HOST", "::", "is an IPv6 address"),
    *[("LMC_HOST", text, "is not a host") for text in ("a b", "-a", "a/b", "hôte", "*", "a,b")],
    *[
        ("LMC_PORT", text, "is not a port; write a number from 1 to 65535")
        for text in ("0", "65536", "-1", "80.0", "1e3", "http", "0x50", "6_555", "٦٥٥٥")
    ],
    ("LMC_PORT", '"6555"', QUOTED),
    *[
        ("LMC_L1_GB", text, "is not a size; write a number, or one with a unit")
        for text in (
            "1e3",
            "20G",
            "20 Gb it",
            "-5",
            "+5",
            "lots",
            "1,5",
            "0x10",
            "inf",
            "nan",
            ".5",
            "5.",
            "20GBs",
        )
    ],
    *[("LMC_L1_GB", text, "must be above 0") for text in ("0", "0.0", "0GiB")],
    ("LMC_L1_GB", "'20'", QUOTED),
    *[
        ("LMC_CHUNK", text, "is not a whole number; write digits only")
        for text in ("256.0", "1e3", "-256", "256 tokens", "False", "two", "9" * 30)
    ],
    ("LMC_CHUNK", "0", "must be above 0"),
    ("LMC_EVICTION", "fifo", "is not known; write one of LRU, noop"),
    ("LMC_EVICTION", "IsolatedLRU", "deletes the objects of every salt that has no quota; write LRU or noop"),
    ("LMC_TRANSFER_MODE", "gpu", "is not known; write one of auto, lmcache_driven, engine_driven"),
    *[
        ("LMC_WAIT_S", text, "is not a number of seconds; write it plainly")
        for text in ("10s", "1e2", "-1", "1 min", "inf", "nan", "1:30")
    ],
    ("LMC_WAIT_S", "0", "must be above 0"),
    ("LMC_STOP_S", "ten", "is not a number of seconds"),
    ("LMC_ON_SERVER_EXIT", "die", "is not known; write one of restart, ignore, exit"),
    ("LMC_MQ_TIMEOUT_S", "0", "must be above 0"),
    (
        "LMC_EXTRA_ARGS",
        "--foo 'bar",
        "cannot be split into arguments (No closing quotation); balance the quotes",
    ),
    ("LMC_EXTRA_ARGS", '"--foo bar"', QUOTED),
    *[
        ("LMC_EXTRA_ARGS", f"{argument} x", f"has {argument}; set {variable} instead")
        for argument, variable in [
            ("--host", "LMC_HOST"),
            ("--port", "LMC_PORT"),
            ("--http-host", "LMC_HTTP_HOST"),
            ("--http-port", "LMC_HTTP_PORT"),
            ("--l1-size-gb", "LMC_L1_GB"),
            ("--chunk-size", "LMC_CHUNK"),
            ("--eviction-policy", "LMC_EVICTION"),
            ("--supported-transfer-mode", "LMC_TRANSFER_MODE"),
            ("--l2-adapter", "LMC_L2_EXTRA"),
        ]
    ],
    ("LMC_EXTRA_ARGS", "--port=1", "has --port; set LMC_PORT instead"),
    ("LMC_EXTRA_ARGS", "--chunk-s 1", "which the server may read as --chunk-size; spell it out"),
    ("LMC_EXTRA_ARGS", "--hash-algorithm builtin", "whose keys mean nothing after a restart; use blake3"),
    ("LMC_EXTRA_ARGS", "--hash-algorithm=builtin", "whose keys mean nothing after a restart; use blake3"),
    (
        "LMC_EXTRA_ARGS",
        "--l1-read-ttl-seconds 60",
        "but store_deadline_s is 60, and an operation must end before",
    ),
    (
        "LMC_EXTRA_ARGS",
        "--l1-write-ttl-seconds=20",
        "but load_deadline_s is 30, and an operation must end before",
    ),
    ("LMC_EXTRA_ARGS", "--l1-write-ttl-seconds soon", "write a number of seconds"),
    ("LMC_L2_EXTRA", "[1]", "is no L2 adapter"),
    ("LMC_L2_EXTRA", '{"kind":"fs"}', "is no L2 adapter"),
    ("LMC_L2_EXTRA", "fs", "is not JSON"),
    ("LMC_LOG_FORMAT", "xml", "is not known; write one of auto, console, json"),
    ("LMC_LOG_LEVEL", "trace", "is not known; write one of debug, info, warning, error"),
    ("LMC_XKV_STORE", "/a,,/b", "names an empty path"),
    ("LMC_XKV_STORE", "~/store", "starts with ~, which nothing expands here; write the whole path"),
    ("LMC_XKV_STORE", "/a,/a", "names a path twice"),
    ("LMC_XKV_STORE_GB", "full", "is not a size"),
    ("LMC_XKV_SHM_DIR", "/dev/shm", "is for a gateway, but neither host nor port is set"),
    ("LMC_XKV_TOKEN_FILE", "/run/token", "is for a gateway, but neither host nor port is set"),
    ("LMC_XKV_METRICS_HOST", "0.0.0.0", "is where metrics_port listens, but that is not set"),
    *[
        ("LMC_XKV_FRAG", text, "is not a power of two from 4096 to 16777216")
        for text in ("100000", "2048", "32MiB", "128KB")
    ],
    ("LMC_XKV_FRAG", "0", "must be above 0"),
    ("LMC_XKV_FRAG", "0.1B", "is not a whole number of bytes"),
    (
        "LMC_XKV_FRAG",
        "big",
        "is not a size; write a number, or one with a unit such as 512MiB, 1.5GiB or 20GB; or write auto",
    ),
    ("LMC_XKV_SLOTS", "2000000", "is not a whole number from 1 to 1048576"),
    ("LMC_XKV_COPY_THREADS", "257", "is not a whole number from 1 to 256"),
    ("LMC_XKV_COPY_THREADS", "many", "or write auto"),
    ("LMC_XKV_VERIFY", "none", "is not known; write one of full, sample, off"),
    ("LMC_XKV_WAIT_S", "3601", "is not a number of seconds above 0, up to 3600"),
    ("LMC_XKV_LOAD_DEADLINE_S", "600", "reaches LMCache's write lock on L1 objects"),
    ("LMC_XKV_STORE_DEADLINE_S", "300", "reaches LMCache's read lock on L1 objects"),
    ("LMC_XKV_PENDING_MB", "-1", "is not a size"),
    ("LMC_XKV_NAMESPACE", "x" * 1025, "is not text of at most 1024 bytes in UTF-8"),
    ("LMC_XKV_STATS_S", "100000", "is not a number of seconds above 0, up to 86400"),
    ("LMC_XKV_PARAMS", "{'batch_slots': 1}", "write names and text in double quotes"),
    ("LMC_XKV_PARAMS", '{"batch_slots": }', "is not JSON (Expecting value at character 17)"),
    ("LMC_XKV_PARAMS", "[]", 'is JSON, but no object; write {"name": value, ...}'),
    ("LMC_XKV_PARAMS", "3", "is JSON, but no object"),
    ("LMC_XKV_PARAMS", '{"store_gb":1,"store_gb":2}', "names 'store_gb' twice; keep one"),
    ("LMC_XKV_PARAMS", '{"store_gb":NaN}', "holds NaN, which is no JSON"),
    ("LMC_XKV_PARAMS", "'{}'", QUOTED),
    ("LMC_XKV_PARAMS", '{"batch_slot":1}', "batch_slot=1 is no parameter; did you mean batch_slots?"),
    ("LMC_XKV_PARAMS", '{"batch_slots":"1"}', "batch_slots='1' is not a whole number from 1 to 1048576"),
    ("LMC_XKV_PARAMS", '{"verify":true}', 'verify=True is not "full", "sample" or "off"'),
    ("LMC_XKV_PARAMS", '{"port":65536}', "port=65536 is not a port from 1 to 65535"),
    (
        "LMC_XKV_PARAMS",
        '{"store":"/a","port":1}',
        "port=1 chooses a gateway, but store='/a' is set too; drop one",
    ),
    ("LMC_XKV_PARAMS", "[" * 100_000, "is nested too deeply"),
]


@pytest.mark.parametrize(("variable", "text", "value"), GOOD)
def test_what_is_understood(variable: str, text: str, value: object) -> None:
    settings = load({variable: text}, {}).settings
    assert getattr(settings, variable.removeprefix("LMC_").lower()) == value


@pytest.mark.parametrize(("variable", "text", "message"), BAD)
def test_what_is_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load({variable: text}, {})
    (problem,) = error.value.problems
    assert str(problem).startswith(variable)
    assert message in str(problem)


def test_the_table_is_long_enough_to_mean_something() -> None:
    assert len(GOOD) + len(BAD) >= 150
