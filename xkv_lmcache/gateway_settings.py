"""The gateway's settings, declared once.

A field of `GatewaySettings` is an option (`--max-slots`), a variable (`XKV_GATEWAY_MAX_SLOTS`) and a key of
the TOML file (`max_slots`), in this order of precedence; parsing, the help and the reference page read the
declaration.
"""

from __future__ import annotations

import difflib
import grp
import ipaddress
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from xkv_lmcache import grammar
from xkv_lmcache.params import (
    DEFAULT_FRAGMENT_BYTES,
    DEFAULT_STORE,
    MAX_FRAGMENT_BYTES,
    MIN_FRAGMENT_BYTES,
)
from xkv_lmcache.problems import SettingProblem, SettingsError

PREFIX: Final = "XKV_GATEWAY_"

CONFIG: Final = PREFIX + "CONFIG"
"""The variable that names the TOML file, as `--config` does."""

MAX_TOKEN_BYTES: Final = 1024

_SERVICE_LINK_NAME: Final = re.compile(
    rf"{PREFIX}(.*_)?(SERVICE_(HOST|PORT)(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_.+)?)"
)


@dataclass(frozen=True)
class Kind:
    """The type of a setting as the help names it."""

    name: str


def _kind(name: str, parse: Callable[[str], object]) -> tuple[BeforeValidator, Kind]:
    return BeforeValidator(parse), Kind(name)


def _choice(*names: str) -> tuple[BeforeValidator, Kind]:
    return _kind(" or ".join(names), grammar.choice(*names))


def _count(high: int) -> tuple[BeforeValidator, Kind]:
    return _kind(f"whole number up to {high}", grammar.between(grammar.integer, 1, high))


def _seconds(low: float, high: float) -> tuple[BeforeValidator, Kind]:
    return _kind(f"seconds from {low:g} to {high:g}", grammar.between(grammar.seconds, low, high))


def _fragment_bytes(text: str) -> int:
    value = grammar.byte_count(text)
    if not MIN_FRAGMENT_BYTES <= value <= MAX_FRAGMENT_BYTES or value & (value - 1):
        limits = f"{MIN_FRAGMENT_BYTES} to {MAX_FRAGMENT_BYTES}"
        raise ValueError(f"is not a power of two from {limits}; write one such as 128KiB")
    return value


def _socket_mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text) or int(text, 8) & 0o600 != 0o600:
        raise ValueError('is no octal mode that lets the owner read and write; write one such as "0660"')
    return int(text, 8)


def _group(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    except KeyError:
        raise ValueError("is no group of this system; write a group's name or number") from None


FragmentBytes = Annotated[int | str, *_kind("bytes or auto", grammar.or_auto(_fragment_bytes))]
GiB = Annotated[float, *_kind("size in GiB", grammar.size(grammar.GIB))]


def _setting(default: Any, meaning: str) -> Any:
    return Field(default, description=meaning)


class GatewaySettings(BaseModel):
    """The settings in force. Sizes are in the unit of their name, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Annotated[list[str], *_kind("paths", grammar.paths)] = _setting(
        [DEFAULT_STORE], "the store: a folder, files or block devices, one or several, comma-separated"
    )
    store_gb: GiB = _setting(16.0, "size of a new store, for files; a block device is used whole")
    fragment_bytes: FragmentBytes = _setting(
        "auto",
        f"bytes of one fragment; auto: the store's, {DEFAULT_FRAGMENT_BYTES} for a new one",
    )
    host: Annotated[list[str], *_kind("hosts", grammar.hosts)] = _setting(
        ["127.0.0.1"],
        "where to listen: names or addresses, IPv4 or IPv6, comma-separated; beyond loopback with token_file",
    )
    port: Annotated[int, *_kind("port", grammar.port)] = _setting(5557, "TCP port to listen on")
    token_file: Annotated[str, *_kind("path", grammar.text)] | None = _setting(
        None, "file with the secret that clients must show"
    )
    shm_dir: Annotated[str, *_kind("path", grammar.text)] = _setting(
        "/dev/shm", "folder shared with the clients, through which they get their session's memory"
    )
    socket_mode: Annotated[int, *_kind("octal mode", _socket_mode)] = _setting(
        0o600, "permissions of a session's socket in that folder: who may open a session"
    )
    socket_group: Annotated[int, *_kind("group", _group)] | None = _setting(
        None, "group of that socket; unset: the gateway's own"
    )
    io_engine: Annotated[str, *_choice("auto", "uring", "pool")] = _setting(
        "auto", "how I/O is done: io_uring, a pool of threads, or the first that works"
    )
    direct_io: Annotated[str, *_choice("auto", "on", "off")] = _setting(
        "auto", "whether I/O goes round the page cache; auto tries it"
    )
    depth: Annotated[int, *_count(4096)] = _setting(32, "requests in flight per drive")
    share_drives: Annotated[str, *_choice("auto", "on", "off")] = _setting(
        "auto",
        "clients read what they lease from the drives themselves; auto: block devices, on: files as well",
    )
    max_sessions: Annotated[int, *_count(128)] = _setting(64, "sessions at once")
    max_slots: Annotated[int, *_count(65536)] = _setting(
        65536, "slots of one session; each takes fragment_bytes of memory"
    )
    heartbeat_s: Annotated[float, *_seconds(0.01, 60)] = _setting(
        0.5, "longest pause between signs of life; below half of every client's wait_timeout_s"
    )
    client_silence_s: Annotated[float, *_seconds(0.1, 3600)] = _setting(
        15.0, "a client that is silent for so long loses its session"
    )
    log_format: Annotated[str, *_choice("auto", "console", "json")] = _setting(
        "auto", "the log on stderr: auto is console on a terminal, JSON lines otherwise"
    )
    log_level: Annotated[str, *_choice("debug", "info", "warning", "error")] = _setting(
        "info", "what is logged"
    )
    metrics_host: Annotated[str, *_kind("host", grammar.gateway_host)] = _setting(
        "127.0.0.1", "where metrics_port listens: a name or address"
    )
    metrics_port: Annotated[int, *_kind("port", grammar.port)] | None = _setting(
        None, "HTTP port of /metrics, /livez, /readyz and /status, for anyone who reaches it; unset: none"
    )

    @property
    def wanted_fragment_bytes(self) -> int | None:
        """`fragment_bytes` as a number, or None where the store decides."""
        return None if isinstance(self.fragment_bytes, str) else self.fragment_bytes


@dataclass(frozen=True)
class Setting:
    """One setting as the command line, the environment, the file and the help know it."""

    field: str
    kind: str
    default: object
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.field.upper()

    @property
    def option(self) -> str:
        """The command-line option."""
        return "--" + self.field.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as a user would write it."""
        match self.default:
            case None:
                return "unset"
            case list(value):
                return ",".join(value)
            case float(value):
                return f"{value:g}"
            case int(value) if self.field == "socket_mode":
                return f"0{value:o}"
            case value:
                return str(value)

    @property
    def help(self) -> str:
        """What there is to say about it, in one line."""
        return f"{self.meaning} ({self.kind}; default: {self.default_text})"


def _settings() -> dict[str, Setting]:
    settings = {}
    for field, info in GatewaySettings.model_fields.items():
        # Pydantic leaves the metadata of an optional field inside its union.
        members = [
            item
            for member in getattr(info.annotation, "__args__", ())
            for item in getattr(member, "__metadata__", ())
        ]
        kind = next(item.name for item in [*info.metadata, *members] if isinstance(item, Kind))
        settings[field] = Setting(field, kind, info.get_default(), info.description or "")
    return settings


SETTINGS: Final = _settings()
"""Every setting by its field, in the order of the help."""


@dataclass(frozen=True)
class Configuration:
    """Settings that passed every check."""

    settings: GatewaySettings
    token: str | None
    """The secret in `token_file`."""
    warnings: tuple[str, ...]
    """What is allowed, but worth a line in the log."""


def load(
    environ: Mapping[str, str],
    options: Mapping[str, str],
    config: str | None = None,
    fields: Iterable[str] | None = None,
) -> Configuration:
    """Read the settings: `options` (by field) go before `environ`, that before the TOML file `config`.

    With `fields`, only those are read, and nothing else is checked: for a client of the gateway. Raises
    `SettingsError` with every problem there is.
    """
    problems: dict[str, SettingProblem] = {}
    config = config or environ.get(CONFIG, "").strip() or None
    file = _read_file(config, problems) if config else {}
    wanted = SETTINGS if fields is None else {field: SETTINGS[field] for field in fields}
    texts: dict[str, str] = {}
    sources: dict[str, str] = {}
    for setting in wanted.values():
        for source, value in (
            (setting.option, options.get(setting.field)),
            (setting.variable, environ.get(setting.variable)),
            (f"{config}: {setting.field}", file.get(setting.field)),
        ):
            try:
                text = "" if value is None else _text(setting, value)
                if text:
                    grammar.check_shape(text)
            except ValueError as error:
                problems[setting.field] = SettingProblem(source, str(value), str(error))
                break
            if text:
                texts[setting.field], sources[setting.field] = text, source
                break

    def report(field: str, message: str) -> None:
        source = sources.get(field, SETTINGS[field].variable)
        problems.setdefault(field, SettingProblem(source, texts.get(field), message))

    settings = _parse(texts, problems, report)
    token = None
    if settings.token_file is not None:
        try:
            token = read_token(settings.token_file)
        except ValueError as error:
            report("token_file", str(error))
    if fields is None:
        for field, message in _contradictions(settings):
            report(field, message)
        for key in sorted(set(file) - set(SETTINGS)):
            problems[key] = SettingProblem(f"{config}: {key}", None, _unknown(key, SETTINGS))
    if problems:
        raise SettingsError(problems.values())
    warnings = _warnings(environ, settings, texts) if fields is None else ()
    return Configuration(settings, token, tuple(warnings))


def read_token(path: str) -> str:
    """The secret in the file at `path`, without the line end.

    Raises `ValueError` with what is wrong and the cure.
    """
    try:
        with open(path, "rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 4).decode().rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); check the path and its rights") from None
    except UnicodeDecodeError:
        raise ValueError("holds bytes that are no UTF-8 text; write a secret of letters and digits") from None
    if not token.strip():
        raise ValueError("is empty; write a secret into it, such as the output of `openssl rand -hex 32`")
    if len(token.encode()) > MAX_TOKEN_BYTES:
        raise ValueError(f"holds more than {MAX_TOKEN_BYTES} bytes; write a shorter secret")
    return token


def markdown() -> str:
    """The table of the settings in docs/gateway.md."""
    rows = ["| option | variable | key of the file | type | default | meaning |", "|---|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        cells = (setting.option, setting.variable, setting.field)
        names = " | ".join(f"`{cell}`" for cell in cells)
        rows.append(f"| {names} | {setting.kind} | {setting.default_text} | {setting.meaning} |")
    return "\n".join(rows) + "\n"


def _read_file(config: str, problems: dict[str, SettingProblem]) -> dict[str, object]:
    def report(message: str) -> dict[str, object]:
        problems[""] = SettingProblem("--config", config, message)
        return {}

    try:
        return tomllib.loads(Path(config).read_text())
    except OSError as error:
        return report(f"cannot be read ({error.strerror}); check the path and its rights")
    except UnicodeDecodeError:
        return report("is no UTF-8 text; write TOML, such as port = 5557")
    except tomllib.TOMLDecodeError as error:
        return report(f"is not TOML: {error}; write lines such as port = 5557")


def _text(setting: Setting, value: object) -> str:
    """A value of the TOML file as the text that the other sources would have."""
    if isinstance(value, str):
        return value.strip()
    if setting.field == "socket_mode":
        raise ValueError('is a number; write the mode as text, such as "0660"')
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    if isinstance(value, list) and setting.field in ("store", "host"):
        if all(isinstance(item, str) and "," not in item for item in value):
            return ",".join(value)
        raise ValueError("is not a list of texts without commas; write one text per path or host")
    raise ValueError("is neither text nor a number; write one value")


def _parse(
    texts: Mapping[str, str], problems: Mapping[str, SettingProblem], report: Callable[[str, str], None]
) -> GatewaySettings:
    """Parse what has no problem yet; what does not parse is reported and left at its default."""
    sound = {field: text for field, text in texts.items() if field not in problems}
    try:
        return GatewaySettings.model_validate(sound)
    except ValidationError as error:
        for detail in error.errors():
            field = str(detail["loc"][0])
            report(field, str(detail["ctx"]["error"]))
            sound.pop(field, None)
    return GatewaySettings.model_validate(sound)


def _contradictions(settings: GatewaySettings) -> Iterable[tuple[str, str]]:
    token_file = SETTINGS["token_file"].variable
    if settings.token_file is None and any(_is_beyond_loopback(host) for host in settings.host):
        yield (
            "host",
            f"lets other machines in, which needs a token; set {token_file}, or listen on 127.0.0.1",
        )
    if settings.client_silence_s < 4 * settings.heartbeat_s:
        least = f"{4 * settings.heartbeat_s:g}"
        yield (
            "client_silence_s",
            f"is below four times heartbeat_s, which one lost beat ends; set {least} or more",
        )


def _is_beyond_loopback(host: str) -> bool:
    """Whether `host` is an address that is not loopback; a name is known only when it is resolved."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _warnings(
    environ: Mapping[str, str], settings: GatewaySettings, texts: Mapping[str, str]
) -> Iterable[str]:
    if "store" not in texts:
        yield (
            f"no store is set: {settings.store[0]} with {settings.store_gb:g} GiB is used; "
            f"{SETTINGS['store'].variable} and {SETTINGS['store_gb'].variable} set another"
        )
    if settings.token_file is not None:
        mode = stat.S_IMODE(Path(settings.token_file).stat().st_mode)
        if mode & 0o077:
            yield f"token_file={settings.token_file!r} has mode 0{mode:o}: others can read it; chmod 600 it"
    known = {setting.variable for setting in SETTINGS.values()} | {CONFIG}
    links = [name for name in environ if _SERVICE_LINK_NAME.fullmatch(name)]
    if links:
        yield (
            f"{', '.join(sorted(links))}: Kubernetes service links, not settings; "
            "set enableServiceLinks: false in the pod, or rename the service"
        )
    for name in sorted(set(environ) - known - set(links)):
        if name.upper().startswith(PREFIX):
            yield f"{name} {_unknown(name.upper(), sorted(known))}"


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"is no setting; did you mean {near[0]}?" if near else "is no setting; --help lists them all"
