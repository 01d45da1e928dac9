"""The gateway's settings: where they come from, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from xkv_lmcache.gateway_settings import (
    PREFIX,
    SETTINGS,
    GatewaySettings,
    load,
    markdown,
    read_token,
)
from xkv_lmcache.problems import SettingsError

DOCUMENT = Path(__file__).parents[2] / "docs" / "gateway.md"


def problems(
    environ: dict[str, str] | None = None, options: dict[str, str] | None = None, config: str | None = None
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(environ or {}, options or {}, config)
    return [str(problem) for problem in caught.value.problems]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_nothing_set_gives_the_defaults_and_says_so() -> None:
    configuration = load({}, {})
    assert configuration.settings == GatewaySettings()
    assert (configuration.settings.host, configuration.settings.port) == (["127.0.0.1"], 5557)
    (warning,) = configuration.warnings
    assert "no store is set: /var/lib/xkv with 16 GiB" in warning and "XKV_GATEWAY_STORE" in warning


def test_options_go_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    config = write(tmp_path / "gateway.toml", "store = '/file'\nport = 1\ndepth = 1\nmax_slots = 1\n")
    environ = {PREFIX + "PORT": "2", PREFIX + "DEPTH": "2", PREFIX + "STORE": " "}
    settings = load(environ, {"depth": "3"}, config).settings
    assert (settings.depth, settings.port, settings.max_slots) == (3, 2, 1)
    assert settings.store == ["/file"], "what is blank is unset"
    assert settings.max_sessions == 64
    assert load({**environ, PREFIX + "CONFIG": config}, {}).settings.max_slots == 1


def test_the_file_has_toml_s_types(tmp_path: Path) -> None:
    config = write(
        tmp_path / "gateway.toml",
        "store = ['/a', '/b']\nstore_gb = 1.5\nfragment_bytes = 4096\nhost = ['::1', 'localhost']\n"
        "heartbeat_s = 1\nsocket_mode = '0660'\nlog_level = 'DEBUG'\n",
    )
    settings = load({}, {}, config).settings
    assert (settings.store, settings.store_gb, settings.fragment_bytes) == (["/a", "/b"], 1.5, 4096)
    assert (settings.host, settings.heartbeat_s) == (["::1", "localhost"], 1.0)
    assert (settings.socket_mode, settings.log_level) == (0o660, "debug")


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("store", "/dev/nvme1n1, /dev/nvme2n1", ["/dev/nvme1n1", "/dev/nvme2n1"]),
        ("store_gb", "512MiB", 0.5),
        ("store_gb", "2", 2.0),
        ("fragment_bytes", "128KiB", 131072),
        ("fragment_bytes", "AUTO", "auto"),
        ("host", "[::1],127.0.0.1", ["::1", "127.0.0.1"]),
        ("socket_mode", "660", 0o660),
        ("socket_group", "root", 0),
        ("socket_group", "1234", 1234),
        ("io_engine", "Uring", "uring"),
    ],
)
def test_texts_become_values(field: str, text: str, value: object) -> None:
    for settings in (load({PREFIX + field.upper(): text}, {}), load({}, {field: text})):
        assert getattr(settings.settings, field) == value


@pytest.mark.parametrize(
    ("field", "text", "cure"),
    [
        ("port", "0", "is not a port; write a number from 1 to 65535"),
        ("port", "tcp://10.0.0.1:80", "is a Kubernetes service link; set enableServiceLinks: false"),
        ("port", "'5557'", "remove them there"),
        ("host", "127.0.0.1:5557", "has a port in it; write the host alone"),
        ("host", "::1,", "names an empty host"),
        ("store", "/a,,/b", "names an empty path"),
        ("store", "/a,/a", "names a path twice"),
        ("store_gb", "1e3", "is not a size; write a number"),
        ("fragment_bytes", "5000", "is not a power of two from 4096 to 16777216"),
        ("socket_mode", "0460", "is no octal mode that lets the owner read and write"),
        ("socket_group", "no-such-group", "is no group of this system"),
        ("io_engine", "aio", "write one of auto, uring, pool"),
        ("depth", "0", "is not between 1 and 4096"),
        ("max_sessions", "1000", "is not between 1 and 128"),
        ("heartbeat_s", "-1", "is not a number of seconds"),
        ("client_silence_s", "1", "set 2 or more"),
        ("token_file", "/no/such/file", "cannot be read (No such file or directory)"),
        ("metrics_port", "94000", "is not a port"),
        ("host", "0.0.0.0", "lets other machines in, which needs a token; set XKV_GATEWAY_TOKEN_FILE"),
        ("host", "::1,fd00::1", "needs a token"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_its_cure(field: str, text: str, cure: str) -> None:
    (problem,) = problems({PREFIX + field.upper(): text})
    assert problem.startswith(f"{PREFIX}{field.upper()}={text!r} ") and cure in problem
    (problem,) = problems({}, {field: text})
    assert problem.startswith(f"--{field.replace('_', '-')}={text!r} ") and cure in problem


def test_every_error_is_reported_at_once_each_with_its_source(tmp_path: Path) -> None:
    config = write(tmp_path / "g.toml", "depth = 0\nsocket_mode = 0o660\nprot = 1\nstore = {}\n")
    found = problems({PREFIX + "PORT": "x"}, {"log_level": "loud"}, config)
    assert len(found) == 6
    for start, part in [
        ("XKV_GATEWAY_PORT='x'", "is not a port"),
        ("--log-level='loud'", "debug, info, warning, error"),
        (f"{config}: depth='0'", "between 1 and 4096"),
        (f"{config}: socket_mode='432'", 'write the mode as text, such as "0660"'),
        (f"{config}: prot:", "did you mean port?"),
        (f"{config}: store='{{}}'", "write one value"),
    ]:
        assert any(problem.startswith(start) and part in problem for problem in found), (start, found)


@pytest.mark.parametrize(
    ("text", "part"), [("port = ", "is not TOML"), (None, "cannot be read (No such file or directory)")]
)
def test_a_file_that_is_none_is_named(text: str | None, part: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    if text is not None:
        path.write_text(text)
    (problem,) = problems({}, {}, str(path))
    assert problem.startswith(f"--config={str(path)!r} ") and part in problem


def test_a_wrong_name_is_warned_about_with_the_nearest(tmp_path: Path) -> None:
    environ = {
        PREFIX + "PROT": "1",
        PREFIX + "SERVICE_HOST": "10.0.0.1",
        PREFIX + "PORT_5557_TCP": "tcp://10.0.0.1:5557",
        PREFIX + "STORE": str(tmp_path),
        "XKV_LOG": "info",
    }
    links, name = load(environ, {}).warnings
    assert links.startswith("XKV_GATEWAY_PORT_5557_TCP, XKV_GATEWAY_SERVICE_HOST: Kubernetes service links")
    assert name == "XKV_GATEWAY_PROT is no setting; did you mean XKV_GATEWAY_PORT?"


def test_a_token_opens_the_gateway_to_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("a secret\n")
    path.chmod(0o600)
    options = {"host": "0.0.0.0", "token_file": str(path), "store": str(tmp_path)}
    configuration = load({}, options)
    assert (configuration.token, configuration.warnings) == ("a secret", ())
    path.chmod(0o640)
    (warning,) = load({}, options).warnings
    assert "has mode 0640: others can read it" in warning


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\n", "is empty"), (b"\xff\xfe", "no UTF-8"), (b"x" * 2000, "more than 1024")],
)
def test_a_token_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_token(str(path))


def test_a_client_reads_where_the_gateway_is_and_nothing_else(tmp_path: Path) -> None:
    config = write(tmp_path / "gateway.toml", "port = 7000\ndepth = 0\nunknown = 1\n")
    configuration = load({PREFIX + "HOST": "0.0.0.0"}, {}, config, fields=("host", "port"))
    assert (configuration.settings.host, configuration.settings.port) == (["0.0.0.0"], 7000)


def test_the_document_lists_every_setting() -> None:
    assert markdown() in DOCUMENT.read_text(), (
        "write xkv_lmcache.gateway_settings.markdown() into docs/gateway.md"
    )
    for setting in SETTINGS.values():
        assert f"`{setting.variable}`" in markdown()


def test_what_the_help_calls_a_default_is_text_with_the_default_s_meaning() -> None:
    texts = {
        PREFIX + setting.field.upper(): setting.default_text
        for setting in SETTINGS.values()
        if setting.default_text != "unset"
    }
    assert load(texts, {}).settings == GatewaySettings()
