"""Settings as a whole: precedence, errors in one go, warnings, the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.harness import REPOSITORY
from xkv_lmcache.params import AdapterParams
from xkv_lmcache.problems import SettingProblem, SettingsError
from xkv_lmcache_autostart import reference
from xkv_lmcache_autostart.settings import VARIABLES, Settings, load


def test_options_go_before_the_environment_before_the_defaults() -> None:
    environ = {"LMC_PORT": "7000", "LMC_CHUNK": "128"}
    settings = load(environ, {"port": "7001"}).settings
    assert (settings.port, settings.chunk, settings.http_port) == (7001, 128, 8080)


def test_params_are_merged_last() -> None:
    environ = {
        "LMC_XKV_STORE": "/a",
        "LMC_XKV_SLOTS": "64",
        "LMC_XKV_PARAMS": '{"batch_slots":2048,"store":["/b","/c"],"io_engine":"pool"}',
    }
    configuration = load(environ, {"xkv_slots": "128"})
    assert configuration.params.batch_slots == 2048
    assert configuration.params.store_paths == ["/b", "/c"]
    assert configuration.params.io_engine == "pool"
    assert configuration.settings.adapter_params() == {
        "store": ["/b", "/c"],
        "batch_slots": 2048,
        "io_engine": "pool",
    }


def test_every_error_is_reported_at_once() -> None:
    environ = {
        "LMC_PORT": "tcp://10.0.0.1:80",
        "LMC_L1_GB": "'20'",
        "LMC_HTTP_HOST": "::1",
        "LMC_XKV_FRAG": "100",
        "LMC_XKV_PARAMS": '{"nonsense":1,"verify":"no"}',
        "LMC_EXTRA_ARGS": "--chunk-size 1",
        "LMC_XKV_STORE_DEADLINE_S": "400",
    }

    def check(settings: Settings) -> list[SettingProblem]:
        assert settings.port == 6555, "what does not parse is at its default for later checks"
        return [SettingProblem("COMMAND", None, "is wrong too")]

    with pytest.raises(SettingsError) as error:
        load(environ, {"chunk": "none"}, check)
    texts = [str(problem) for problem in error.value.problems]
    expected = {
        "LMC_PORT='tcp://10.0.0.1:80' is",
        "LMC_L1_GB=\"'20'\" has",
        "LMC_HTTP_HOST='::1' is",
        "LMC_XKV_FRAG='100' is",
        "LMC_XKV_PARAMS: nonsense=1 is",
        "LMC_XKV_PARAMS: verify='no' is",
        "LMC_EXTRA_ARGS: has --chunk-size",
        "LMC_XKV_STORE_DEADLINE_S='400' reaches",
        "--chunk='none' is",
        "COMMAND: is wrong too",
    }
    assert len(texts) == len(expected)
    for beginning in expected:
        assert any(text.startswith(beginning) for text in texts), beginning


def test_secret_values_stay_out_of_messages() -> None:
    with pytest.raises(SettingsError) as error:
        load({"LMC_L2_EXTRA": '{"secret_key":"hunter2"}', "LMC_EXTRA_ARGS": "--port 1 --token hunter2"}, {})
    assert len(error.value.problems) == 2
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LMC_L1GB": "5"}, "LMC_L1GB is no setting and has no effect; did you mean LMC_L1_GB?"),
        ({"lmc_port": "5"}, "lmc_port is no setting and has no effect; did you mean LMC_PORT?"),
        ({"LMC_XKV_STORES": "5"}, "did you mean LMC_XKV_STORE?"),
        ({"LMC_QQQQQQQQ": "5"}, "LMC_QQQQQQQQ is no setting and has no effect; --help lists them all"),
        (
            {"LMC_SERVER_SERVICE_HOST": "10.0.0.1", "LMC_SERVER_PORT_80_TCP_ADDR": "10.0.0.1"},
            "LMC_SERVER_PORT_80_TCP_ADDR, LMC_SERVER_SERVICE_HOST: Kubernetes service links, not settings",
        ),
    ],
)
def test_unknown_names_are_warned_about(environ: dict[str, str], message: str) -> None:
    (warning,) = load(environ, {}).warnings
    assert message in warning


def test_other_names_are_none_of_our_business() -> None:
    assert load({"LMCACHE_LOG_LEVEL": "DEBUG", "PATH": "/bin", "XLMC_PORT": "1"}, {}).warnings == ()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no store is set: /var/lib/xkv with 16 GiB is used"),
        ({"LMC_XKV_STORE_GB": "2"}, "/var/lib/xkv with 2 GiB is used"),
        ({"LMC_XKV_PARAMS": '{"store_gb":3}'}, "/var/lib/xkv with 3 GiB is used"),
        ({}, "no namespace is set"),
        ({"LMC_HOST": "0.0.0.0"}, "LMC_HOST='0.0.0.0' is not loopback: the server unpickles"),
        ({"LMC_HTTP_HOST": "10.1.2.3"}, "LMC_HTTP_HOST='10.1.2.3' is not loopback: the front end"),
        ({"LMC_EXTRA_ARGS": "--run-script-api-enabled"}, "undoes the front end's scripts staying off"),
        (
            {"LMC_EXTRA_ARGS": "--worker-registration-grace-seconds=120"},
            "undoes the launcher's grace of days",
        ),
    ],
)
def test_risks_are_warned_about(environ: dict[str, str], message: str) -> None:
    assert any(message in warning for warning in load(environ, {}).server_warnings)


def test_safe_settings_bring_no_warning() -> None:
    environ = {"LMC_HOST": "localhost", "LMC_XKV_PARAMS": '{"store":"/a","namespace":"n"}'}
    assert load(environ, {}).server_warnings == ()


def test_contradicting_switches() -> None:
    with pytest.raises(SettingsError, match="contradicts LMC_ENABLE"):
        load({"LMC_ENABLE": "1", "LMC_WAIT_FOR_SERVER": "1"}, {})
    with pytest.raises(SettingsError, match="is the server's ZMQ port too"):
        load({"LMC_HTTP_PORT": "6555"}, {})


def test_every_adapter_variable_sets_a_parameter_that_exists() -> None:
    adapter = {name for name in VARIABLES if name.startswith("LMC_XKV_")} - {"LMC_XKV_PARAMS"}
    assert {VARIABLES[name].param for name in adapter} <= set(AdapterParams.model_fields)
    assert all(VARIABLES[name].param for name in adapter)
    assert not any(VARIABLES[name].param for name in set(VARIABLES) - adapter)


def test_the_settings_of_the_specification_are_all_there() -> None:
    """The names that users already have in their manifests."""
    names = """ENABLE HOST PORT HTTP_HOST HTTP_PORT L1_GB CHUNK EVICTION TRANSFER_MODE WAIT_S STOP_S
        ON_SERVER_EXIT MQ_TIMEOUT_S INJECT EXTRA_ARGS PASS_ENV WAIT_FOR_SERVER ALLOW_LORA MODEL
        L2_EXTRA LOG_FORMAT LOG_LEVEL
        TELEMETRY XKV_STORE XKV_STORE_GB XKV_HOST XKV_PORT XKV_SHM_DIR XKV_METRICS_HOST XKV_METRICS_PORT
        XKV_TOKEN_FILE XKV_FRAG XKV_SLOTS XKV_COPY_THREADS XKV_VERIFY XKV_WAIT_S XKV_LOAD_DEADLINE_S
        XKV_STORE_DEADLINE_S XKV_REOPEN_S XKV_PENDING_MB XKV_NAMESPACE XKV_STATS_S XKV_STATS_PATH
        XKV_PARAMS"""
    assert set(VARIABLES) == {f"LMC_{name}" for name in names.split()}


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(REPOSITORY, "docs/settings.md").read_text()
    assert page == reference.markdown(), "write it again: python3 -m xkv_lmcache_autostart --print settings"


def test_defaults_in_the_reference_parse_to_themselves() -> None:
    """What the help calls a default is text that the grammar takes, with the default's meaning."""
    for variable in VARIABLES.values():
        text = reference.default_text(variable)
        if text != "unset":
            settings = load({variable.name: text}, {}).settings
            assert getattr(settings, variable.field) == variable.default, variable.name
