"""The settings: every `LMC_*` variable, declared once.

A field of `Settings` is a variable (`l1_gb` is `LMC_L1_GB`) and an option (`--l1-gb`); parsing, the help and
the reference page all read the declaration. What a `LMC_XKV_*` variable may hold beyond its grammar is the
business of the adapter parameter that it sets (`xkv_lmcache.params`).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from xkv_lmcache import grammar
from xkv_lmcache.params import AdapterParams, ParamsError
from xkv_lmcache.problems import SettingProblem, SettingsError

PREFIX: Final = "LMC_"

AUTO_NAMESPACE: Final = "auto"
"""The namespace that stands for one derived from the model (`namespace.py`)."""

_SERVICE_LINK_NAME: Final = re.compile(
    r"LMC_.*(_SERVICE_(HOST|PORT)(_.+)?|_PORT_[0-9]+_(TCP|UDP|SCTP)(_.+)?)"
)


@dataclass(frozen=True)
class Kind:
    """The type of a setting as the help names it."""

    name: str
    choices: tuple[str, ...] = ()
    """The words that it takes, for a shell to complete; empty where there are more than can be listed."""


def _kind(
    name: str, parse: Callable[[str], object], choices: tuple[str, ...] = ()
) -> tuple[BeforeValidator, Kind]:
    return BeforeValidator(parse), Kind(name, choices)


def _choice(*names: str) -> tuple[BeforeValidator, Kind]:
    return _kind(" or ".join(names), grammar.choice(*names), names)


Boolean = Annotated[bool, *_kind("boolean", grammar.boolean, ("1", "0"))]
Port = Annotated[int, *_kind("port", grammar.port)]
Host = Annotated[str, *_kind("host", grammar.server_host)]
GatewayHost = Annotated[str, *_kind("host", grammar.gateway_host)]
Count = Annotated[int, *_kind("whole number", grammar.count)]
CountOrAuto = Annotated[int | str, *_kind("whole number or auto", grammar.or_auto(grammar.count))]
BytesOrAuto = Annotated[int | str, *_kind("bytes or auto", grammar.or_auto(grammar.byte_count))]
GiB = Annotated[float, *_kind("size in GiB", grammar.size(grammar.GIB))]
MiB = Annotated[float, *_kind("size in MiB", grammar.size(grammar.MIB))]
Seconds = Annotated[float, *_kind("seconds", grammar.seconds)]
Grace = Annotated[float, *_kind("seconds", grammar.grace)]
Text = Annotated[str, *_kind("text", grammar.text)]
Path = Annotated[str, *_kind("path", grammar.text)]
JsonObject = Annotated[dict[str, object], *_kind("JSON object", grammar.json_object)]
Adapters = Annotated[list[dict[str, object]], *_kind("JSON object or array", grammar.json_adapters)]
Words = Annotated[list[str], *_kind("words", grammar.shell_words)]
Names = Annotated[list[str], *_kind("names or patterns", grammar.names)]
Eviction = Annotated[
    str, *_kind("LRU or noop", grammar.choice("LRU", "noop", "IsolatedLRU"), ("LRU", "noop"))
]
TransferMode = Annotated[str, *_choice("auto", "lmcache_driven", "engine_driven")]
OnServerExit = Annotated[str, *_choice("restart", "ignore", "exit")]
LogFormat = Annotated[str, *_choice("auto", "console", "json")]
LogLevel = Annotated[str, *_choice("debug", "info", "warning", "error")]
Verify = Annotated[str, *_choice("full", "sample", "off")]


def _setting(default: Any, meaning: str, *, secret: bool = False) -> Any:
    """A setting; one that is `secret` has its value kept out of messages."""
    return Field(default, description=meaning, json_schema_extra={"secret": secret})


def _adapter(param: str, more: str = "") -> Any:
    """A setting that sets an adapter parameter, which has the default and the meaning; None is unset.

    `more` is what the launcher adds to the meaning.
    """
    meaning = f"{AdapterParams.model_fields[param].description}{more}"
    return Field(None, description=meaning, json_schema_extra={"param": param})


class Settings(BaseModel):
    """The settings in force. Sizes are in the unit of their name (GiB, MiB), times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable: Boolean = _setting(False, "start the LMCache server in front of the command")
    host: Host = _setting("127.0.0.1", "the server's ZMQ address")
    port: Port = _setting(6555, "the server's ZMQ port")
    http_host: Host = _setting("127.0.0.1", "address of the server's HTTP front end")
    http_port: Port = _setting(8080, "port of the server's HTTP front end")
    l1_gb: GiB = _setting(20.0, "size of L1, LMCache's tier in host memory")
    chunk: Count = _setting(256, "tokens of one object; a multiple of vLLM's block size")
    eviction: Eviction = _setting("LRU", "eviction policy of L1")
    transfer_mode: TransferMode | None = _setting(
        None,
        "the server's transfer mode; unset: auto where no accelerator is visible, else the server's default",
    )
    wait_s: Seconds = _setting(180.0, "longest wait until the server is ready")
    stop_s: Grace = _setting(10.0, "grace between the signal to stop and KILL")
    on_server_exit: OnServerExit = _setting("restart", "what follows when the server dies under the command")
    mq_timeout_s: Seconds = _setting(10.0, "longest time vLLM waits for an answer of the server")
    inject: Boolean = _setting(True, "add --kv-transfer-config to a `vllm serve` command that has none")
    extra_args: Words = _setting([], "more arguments of the server, split as a shell would", secret=True)
    pass_env: Names = _setting([], "further environment variables that the server may see")
    wait_for_server: Boolean = _setting(
        False, "wait for a server that somebody else runs (LMC_HOST, LMC_HTTP_PORT), then run the command"
    )
    allow_lora: Boolean = _setting(False, "allow --enable-lora, whose adapters LMCache's keys ignore")
    model: Text | None = _setting(
        None,
        "the model for LMC_XKV_NAMESPACE=auto where no vLLM command names it, with the options that matter as "
        "after `vllm serve`",
    )
    l2_extra: Adapters = _setting(
        [], "further L2 adapters after ours; needs LMCache 0.5.6 or newer", secret=True
    )
    log_format: LogFormat = _setting(
        "auto", "the launcher's log: auto is console on a terminal, JSON lines otherwise"
    )
    log_level: LogLevel = _setting("info", "the launcher's log level")
    telemetry: Boolean = _setting(False, "let LMCache and vLLM report usage to their makers")
    xkv_store: Path | None = _adapter("store")
    xkv_store_gb: GiB | None = _adapter("store_gb")
    xkv_host: GatewayHost | None = _adapter("host")
    xkv_port: Port | None = _adapter("port")
    xkv_shm_dir: Path | None = _adapter("shm_dir")
    xkv_metrics_host: GatewayHost | None = _adapter("metrics_host")
    xkv_metrics_port: Port | None = _adapter("metrics_port")
    xkv_token_file: Path | None = _adapter("token_file")
    xkv_frag: BytesOrAuto | None = _adapter("fragment_bytes")
    xkv_slots: Count | None = _adapter("batch_slots")
    xkv_copy_threads: CountOrAuto | None = _adapter("copy_threads")
    xkv_verify: Verify | None = _adapter("verify")
    xkv_wait_s: Seconds | None = _adapter("wait_timeout_s")
    xkv_load_deadline_s: Seconds | None = _adapter("load_deadline_s")
    xkv_store_deadline_s: Seconds | None = _adapter("store_deadline_s")
    xkv_reopen_s: Seconds | None = _adapter("reopen_after_s")
    xkv_pending_mb: MiB | None = _adapter("max_pending_store_mb")
    xkv_namespace: Text | None = _adapter("namespace", "; auto derives it from the files of the model")
    xkv_stats_s: Seconds | None = _adapter("stats_interval_s")
    xkv_stats_path: Path | None = _adapter("stats_path")
    xkv_params: JsonObject = _setting({}, "adapter parameters as JSON, merged last over all of the above")

    def adapter_params(self) -> dict[str, object]:
        """The adapter parameters that are set, `LMC_XKV_PARAMS` merged last."""
        params = {
            param: value
            for field in VARIABLES.values()
            if (param := field.param) and (value := getattr(self, field.field)) is not None
        }
        return params | self.xkv_params

    @property
    def namespace_is_auto(self) -> bool:
        """Whether the namespace is still to be derived from the model."""
        return self.adapter_params().get("namespace") == AUTO_NAMESPACE

    def with_namespace(self, namespace: str) -> Settings:
        """These settings with the namespace that was derived."""
        others = {key: value for key, value in self.xkv_params.items() if key != "namespace"}
        return self.model_copy(update={"xkv_namespace": namespace, "xkv_params": others})

    @property
    def connect_host(self) -> str:
        """Where a client on this machine reaches the server's ZMQ port."""
        return _connectable(self.host)

    @property
    def http_connect_host(self) -> str:
        """Where a client on this machine reaches the server's HTTP front end."""
        return _connectable(self.http_host)


@dataclass(frozen=True)
class Variable:
    """One setting as the environment, the command line and the help know it."""

    field: str
    kind: str
    choices: tuple[str, ...]
    default: object
    meaning: str
    param: str | None
    """The adapter parameter that it sets, if it sets one."""
    secret: bool

    @property
    def name(self) -> str:
        """The environment variable."""
        return PREFIX + self.field.upper()

    @property
    def option(self) -> str:
        """The command-line option."""
        return "--" + self.field.replace("_", "-")


def _variables() -> dict[str, Variable]:
    variables = {}
    for field, info in Settings.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        param = extra.get("param")
        default = info.get_default() if param is None else AdapterParams.model_fields[str(param)].default
        kind = _kind_of(info.annotation, info.metadata)
        variable = Variable(
            field=field,
            kind=kind.name,
            choices=kind.choices,
            default=default,
            meaning=info.description or "",
            param=None if param is None else str(param),
            secret=bool(extra.get("secret")),
        )
        variables[variable.name] = variable
    return variables


def _kind_of(annotation: Any, metadata: Iterable[object]) -> Kind:
    """The kind, which pydantic leaves inside the union of an optional field."""
    members = [
        item for member in getattr(annotation, "__args__", ()) for item in getattr(member, "__metadata__", ())
    ]
    return next(item for item in [*metadata, *members] if isinstance(item, Kind))


VARIABLES: Final = _variables()
"""Every setting by the name of its variable, in the order of the help."""


@dataclass(frozen=True)
class Configuration:
    """Settings that passed every check."""

    settings: Settings
    params: AdapterParams
    warnings: tuple[str, ...]
    """What is allowed, but worth a line in the log."""
    server_warnings: tuple[str, ...]
    """The same, of matter to whoever starts the server."""

    def with_namespace(self, namespace: str) -> Configuration:
        """This configuration with the namespace that was derived from the model."""
        return replace(
            self,
            settings=self.settings.with_namespace(namespace),
            params=self.params.model_copy(update={"namespace": namespace}),
        )


Check = Callable[[Settings], list[SettingProblem]]


def load(environ: Mapping[str, str], options: Mapping[str, str], check: Check | None = None) -> Configuration:
    """Read the settings: `options` (by field name) go before `environ`, that before the defaults.

    `check` adds problems of its own. Raises `SettingsError` with every problem there is.
    """
    given, sources = texts(environ, options)
    problems: dict[str, SettingProblem] = {}

    def report(variable: Variable, message: str) -> None:
        value = None if variable.secret else given.get(variable.field)
        source = sources.get(variable.field, variable.name)
        problems.setdefault(variable.field, SettingProblem(source, value, message))

    for field, text in given.items():
        try:
            grammar.check_shape(text)
        except ValueError as error:
            report(VARIABLES[PREFIX + field.upper()], str(error))
    settings = _parse(given, problems, report)
    for field, message in _contradictions(settings):
        report(VARIABLES[PREFIX + field.upper()], message)
    found = list(problems.values())
    params = AdapterParams()
    try:
        params = AdapterParams.parse(_without_auto(settings))
    except ParamsError as error:
        found += _params_problems(error, settings, given, sources, problems)
    found += _lock_problems(settings, params)
    if check is not None:
        found += check(settings)
    if found:
        raise SettingsError(found)
    return Configuration(
        settings, params, tuple(_name_warnings(environ)), tuple(_server_warnings(settings, params))
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def _connectable(host: str) -> str:
    # A name could lead to IPv6 and to somebody else, an address cannot.
    return "127.0.0.1" if host in ("0.0.0.0", "localhost") else host


def texts(environ: Mapping[str, str], options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The text of every setting that is set, and where it was set, by field; blank is unset."""
    found, sources = {}, {}
    for variable in VARIABLES.values():
        for source, text in (
            (variable.option, options.get(variable.field)),
            (variable.name, environ.get(variable.name)),
        ):
            if text is not None and text.strip():
                found[variable.field] = text.strip()
                sources[variable.field] = source
                break
    return found, sources


def _parse(
    texts: Mapping[str, str], problems: Mapping[str, SettingProblem], report: Callable[[Variable, str], None]
) -> Settings:
    """Parse what has no problem yet; what does not parse is reported and left at its default."""
    sound = {field: text for field, text in texts.items() if field not in problems}
    try:
        return Settings.model_validate(sound)
    except ValidationError as error:
        for detail in error.errors():
            field = str(detail["loc"][0])
            report(VARIABLES[PREFIX + field.upper()], str(detail["ctx"]["error"]))
            sound.pop(field, None)
    return Settings.model_validate(sound)


def _contradictions(settings: Settings) -> Iterable[tuple[str, str]]:
    if settings.eviction == "IsolatedLRU":
        yield "eviction", "deletes the objects of every salt that has no quota; write LRU or noop"
    if settings.port == settings.http_port:
        yield "http_port", f"is the server's ZMQ port too; change it or LMC_PORT ({settings.port})"
    if settings.enable and settings.wait_for_server:
        yield "wait_for_server", "contradicts LMC_ENABLE, which starts a server here; set one of them"
    for message in _extra_args_problems(settings.extra_args):
        yield "extra_args", message


_OWN_ARGUMENTS: Final = {
    "--host": "LMC_HOST",
    "--port": "LMC_PORT",
    "--http-host": "LMC_HTTP_HOST",
    "--http-port": "LMC_HTTP_PORT",
    "--l1-size-gb": "LMC_L1_GB",
    "--chunk-size": "LMC_CHUNK",
    "--eviction-policy": "LMC_EVICTION",
    "--supported-transfer-mode": "LMC_TRANSFER_MODE",
    "--l2-adapter": "LMC_L2_EXTRA",
}
"""Arguments of the server that have a setting of their own, on which the launcher relies."""

_READ_TTL: Final = "--l1-read-ttl-seconds"
_WRITE_TTL: Final = "--l1-write-ttl-seconds"

_SAFE_ARGUMENTS: Final = {
    "--worker-registration-grace-seconds": "the launcher's grace of days for vLLM to register again",
    "--script-allowed-imports": "the front end's scripts staying shut in",
    "--run-script-api-enabled": "the front end's scripts staying off",
    "--runtime-plugin-locations": "the server running no code but its own",
}
"""Arguments that undo a safe default, and the default."""


def arguments(words: Iterable[str]) -> list[tuple[str, str | None]]:
    """The options among `words`: `--name value` and `--name=value` with the value, a bare flag with None."""
    found: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append((name, value if equals else None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
    return found


def _extra_args_problems(words: list[str]) -> Iterable[str]:
    named = [*_OWN_ARGUMENTS, _READ_TTL, _WRITE_TTL, *_SAFE_ARGUMENTS, "--hash-algorithm"]
    for name, value in arguments(words):
        if name in _OWN_ARGUMENTS:
            yield f"has {name}; set {_OWN_ARGUMENTS[name]} instead"
        elif name == "--hash-algorithm" and value == "builtin":
            yield "has --hash-algorithm builtin, whose keys mean nothing after a restart; use blake3"
        elif name not in named and (full := [option for option in named if option.startswith(name)]):
            yield f"has {name}, which the server may read as {full[0]}; spell it out"


def _lock_problems(settings: Settings, params: AdapterParams) -> Iterable[SettingProblem]:
    """Deadlines against the L1 locks that `LMC_EXTRA_ARGS` shortened."""
    for name, value in arguments(settings.extra_args):
        deadline = {
            _READ_TTL: ("store_deadline_s", params.store_deadline_s),
            _WRITE_TTL: ("load_deadline_s", params.load_deadline_s),
        }.get(name)
        if deadline is None:
            continue
        try:
            lock = float(value or "")
        except ValueError:
            yield SettingProblem("LMC_EXTRA_ARGS", None, f"has {name} {value}; write a number of seconds")
            continue
        if lock <= deadline[1]:
            yield SettingProblem(
                "LMC_EXTRA_ARGS",
                None,
                f"has {name} {value}, but {deadline[0]} is {deadline[1]:g}, and an operation must end "
                "before its lock; raise the one or lower the other",
            )


def _without_auto(settings: Settings) -> dict[str, object]:
    """The adapter parameters as far as they are known before the model is looked at."""
    params = settings.adapter_params()
    return params if not settings.namespace_is_auto else params | {"namespace": ""}


def _params_problems(
    error: ParamsError,
    settings: Settings,
    texts: Mapping[str, str],
    sources: Mapping[str, str],
    reported: Mapping[str, SettingProblem],
) -> Iterable[SettingProblem]:
    """Problems of parameters under the names of the settings that set them."""
    fields = {variable.param: variable.field for variable in VARIABLES.values() if variable.param}
    for problem in error.problems:
        field = fields.get(problem.key)
        if problem.key in settings.xkv_params or field is None:
            yield SettingProblem(sources.get("xkv_params", "LMC_XKV_PARAMS"), None, str(problem))
        elif field not in reported:
            yield SettingProblem(sources.get(field, field), texts.get(field), problem.message)


def _name_warnings(environ: Mapping[str, str]) -> Iterable[str]:
    links = [name for name in environ if _SERVICE_LINK_NAME.fullmatch(name) and name not in VARIABLES]
    if links:
        yield (
            f"{', '.join(sorted(links))}: Kubernetes service links, not settings; "
            "set enableServiceLinks: false in the pod, or rename the service"
        )
    for name in sorted(set(environ) - set(VARIABLES) - set(links)):
        if not name.upper().startswith(PREFIX):
            continue
        near = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists them all"
        yield f"{name} is no setting and has no effect{hint}"


def _server_warnings(settings: Settings, params: AdapterParams) -> Iterable[str]:
    if not is_loopback(settings.host):
        yield (
            f"LMC_HOST={settings.host!r} is not loopback: the server unpickles what it receives on port "
            f"{settings.port} without asking who sends it, so whoever reaches it can run code there; keep it "
            "in a private network"
        )
    if not is_loopback(settings.http_host):
        yield (
            f"LMC_HTTP_HOST={settings.http_host!r} is not loopback: the front end on port "
            f"{settings.http_port} shows the server's environment and lets anyone clear the cache or, before "
            "LMCache 0.5.6, run code"
        )
    for name, _ in arguments(settings.extra_args):
        if name in _SAFE_ARGUMENTS:
            yield f"LMC_EXTRA_ARGS has {name}, which undoes {_SAFE_ARGUMENTS[name]}"
    if params.defaulted:
        yield (
            f"no store is set: {params.store_paths[0]} with {params.store_gb:g} GiB is used; "
            "LMC_XKV_STORE and LMC_XKV_STORE_GB set another"
        )
    if settings.model is not None and not settings.namespace_is_auto:
        yield "LMC_MODEL has no effect: it is for LMC_XKV_NAMESPACE=auto"
    if not params.namespace and not settings.namespace_is_auto:
        yield (
            "no namespace is set: models of one name would share objects even if their weights, dtype or "
            "layout differ; LMC_XKV_NAMESPACE=auto tells them apart"
        )
