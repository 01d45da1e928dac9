"""The adapter parameters: what `XkvL2Connector` takes, declared once.

The connector validates its keyword arguments with this model, the launcher builds `adapter_params` with it,
and the launcher's help is written from it. It needs neither the native module nor LMCache.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

DEFAULT_STORE: Final = "/var/lib/xkv"
"""Where the store lives when nothing says otherwise."""

DEFAULT_GATEWAY_HOST: Final = "127.0.0.1"
DEFAULT_GATEWAY_PORT: Final = 5557
"""Where the gateway listens when only the other of host and port is given."""

DEFAULT_SHM_DIR: Final = "/dev/shm"
"""The folder shared with the gateway."""

DEFAULT_METRICS_HOST: Final = "127.0.0.1"
"""Where the plugin's own metrics port listens."""

DEFAULT_FRAGMENT_BYTES: Final = 131072
"""What `fragment_bytes="auto"` means for a new store."""

MIN_FRAGMENT_BYTES: Final = 4096
MAX_FRAGMENT_BYTES: Final = 16 * 1024 * 1024

L1_READ_TTL_S: Final = 300
"""LMCache's default read lock on L1 objects (`--l1-read-ttl-seconds`): a store must end before it does."""

L1_WRITE_TTL_S: Final = 600
"""LMCache's default write lock on L1 objects (`--l1-write-ttl-seconds`): a load must end before it does."""

MAX_NAMESPACE_BYTES: Final = 1024


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one parameter."""

    key: str
    value: object
    message: str
    """What is wrong and the cure: reads on after `key=value`."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!r} {self.message}"


class ParamsError(ValueError):
    """All that is wrong with a set of adapter parameters, each with its key, its value and the cure."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


def _parameter(default: Any, meaning: str, expects: str, **constraints: Any) -> Any:
    """A field: `expects` completes "is not ..." in an error, `meaning` is its line in the help."""
    return Field(default, description=meaning, json_schema_extra={"expects": expects}, **constraints)


class AdapterParams(BaseModel):
    """The keyword arguments of `XkvL2Connector`, in their units, with their defaults.

    Use `AdapterParams.parse`: it checks the parameters together and reports every error at once, with its
    value and cure, which pydantic's own text would not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    store: str | list[str] | None = _parameter(
        None,
        "embedded store: a folder, files or block devices, one or several (comma-separated or a list)",
        "a path, a comma-separated list of paths or a list of paths",
    )
    store_gb: float = _parameter(
        16.0,
        "GiB of the embedded store, for files; a block device is used whole",
        "a number of GiB above 0",
        gt=0,
        le=2**30,
    )
    host: str | None = _parameter(
        None,
        f"the gateway's host, {DEFAULT_GATEWAY_HOST} if port is given",
        "a host name or an address",
        min_length=1,
    )
    port: int | None = _parameter(
        None,
        f"the gateway's port, {DEFAULT_GATEWAY_PORT} if host is given",
        "a port from 1 to 65535",
        ge=1,
        le=65535,
    )
    fragment_bytes: int | Literal["auto"] = _parameter(
        "auto",
        f"bytes of one fragment; auto takes the store's, {DEFAULT_FRAGMENT_BYTES} for a new one",
        f'a power of two from {MIN_FRAGMENT_BYTES} to {MAX_FRAGMENT_BYTES}, or "auto"',
    )
    batch_slots: int = _parameter(
        1024,
        "fragments in flight; takes batch_slots x fragment_bytes of memory",
        "a whole number from 1 to 1048576",
        ge=1,
        le=2**20,
    )
    copy_threads: int | Literal["auto"] = _parameter(
        "auto", "threads that copy and checksum", 'a whole number from 1 to 256, or "auto"'
    )
    verify: Literal["full", "sample", "off"] = _parameter(
        "full", "how much of a loaded object is checked against its checksums", '"full", "sample" or "off"'
    )
    wait_timeout_s: float = _parameter(
        5.0,
        "seconds of silence after which a drive or gateway counts as stalled; deadline of a lookup or delete",
        "a number of seconds above 0, up to 3600",
        gt=0,
        le=3600,
    )
    load_deadline_s: float = _parameter(
        30.0,
        f"greatest age of a load in seconds, below LMCache's write lock on L1 ({L1_WRITE_TTL_S})",
        f"a number of seconds above 0 and below {L1_WRITE_TTL_S}",
        gt=0,
    )
    store_deadline_s: float = _parameter(
        60.0,
        f"greatest age of a store in seconds, below LMCache's read lock on L1 ({L1_READ_TTL_S})",
        f"a number of seconds above 0 and below {L1_READ_TTL_S}",
        gt=0,
    )
    reopen_after_s: float = _parameter(
        5.0,
        "seconds between attempts to reach a lost gateway or drive again",
        "a number of seconds above 0, up to 3600",
        gt=0,
        le=3600,
    )
    max_pending_store_mb: float = _parameter(
        1024.0,
        "MiB of stores that may wait; what comes beyond is refused at once",
        "a number of MiB above 0",
        gt=0,
        le=2**30,
    )
    namespace: str = _parameter(
        "",
        "free text that is part of every key's identity: model revision, dtype, layout",
        f"text of at most {MAX_NAMESPACE_BYTES} bytes in UTF-8",
    )
    stats_interval_s: float = _parameter(
        30.0,
        "seconds between the statistics lines in the log, and between writes of stats_path",
        "a number of seconds above 0, up to 86400",
        gt=0,
        le=86400,
    )
    stats_path: str | None = _parameter(
        None,
        "file that receives the statistics as JSON",
        "the path of a file in an existing folder",
        min_length=1,
    )
    io_engine: Literal["auto", "uring", "pool"] = _parameter(
        "auto",
        "how I/O is done: io_uring, a pool of threads, or the first that works",
        '"auto", "uring" or "pool"',
    )
    direct_io: Literal["auto", "on", "off"] = _parameter(
        "auto", "whether I/O goes round the page cache; auto tries it", '"auto", "on" or "off"'
    )
    shm_dir: str | None = _parameter(
        None,
        f"the folder shared with the gateway, {DEFAULT_SHM_DIR} if not given",
        "the path of a folder",
        min_length=1,
    )
    token_file: str | None = _parameter(
        None,
        "file with the secret shared with a gateway that is not on loopback",
        "the path of a file",
        min_length=1,
    )
    metrics_host: str | None = _parameter(
        None,
        f"address of metrics_port, {DEFAULT_METRICS_HOST} if not given",
        "a host name or an address",
        min_length=1,
    )
    metrics_port: int | None = _parameter(
        None,
        "port of the plugin's own /metrics, /livez, /readyz and /status; off if not given",
        "a port from 1 to 65535",
        ge=1,
        le=65535,
    )

    @field_validator("fragment_bytes")
    @classmethod
    def _is_power_of_two(cls, value: int | str) -> int | str:
        if isinstance(value, int) and (
            not MIN_FRAGMENT_BYTES <= value <= MAX_FRAGMENT_BYTES or value & (value - 1)
        ):
            raise ValueError
        return value

    @field_validator("copy_threads")
    @classmethod
    def _is_thread_count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 256:
            raise ValueError
        return value

    @field_validator("load_deadline_s")
    @classmethod
    def _is_below_write_ttl(cls, value: float) -> float:
        if value >= L1_WRITE_TTL_S:
            raise ValueError(
                f"reaches LMCache's write lock on L1 objects, after which their memory is handed on; set it "
                f"below {L1_WRITE_TTL_S}"
            )
        return value

    @field_validator("store_deadline_s")
    @classmethod
    def _is_below_read_ttl(cls, value: float) -> float:
        if value >= L1_READ_TTL_S:
            raise ValueError(
                f"reaches LMCache's read lock on L1 objects, after which other bytes would be stored; set it "
                f"below {L1_READ_TTL_S}"
            )
        return value

    @field_validator("namespace")
    @classmethod
    def _is_usable_namespace(cls, value: str) -> str:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError("holds characters that UTF-8 cannot encode; use other text") from None
        if size > MAX_NAMESPACE_BYTES:
            raise ValueError
        if value == "auto":
            raise ValueError(
                "is for the launcher, which derives a namespace from the model; spell it out here"
            )
        return value

    @field_validator("store")
    @classmethod
    def _is_list_of_paths(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is None:
            return None
        paths = _split_paths(value)
        if not paths or not all(paths):
            raise ValueError("names an empty path; remove the superfluous comma or name a path")
        for path in paths:
            if "\0" in path:
                raise ValueError("holds a NUL character; remove it")
            if path.startswith("~"):
                raise ValueError("starts with ~, which nothing expands here; write the whole path")
        if len(set(paths)) != len(paths):
            raise ValueError("names a path twice; name each drive once")
        return value

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> Self:
        """Validate `raw`, as it came from JSON or from keyword arguments.

        Raises `ParamsError` (a `ValueError`) that lists every error.
        """
        problems = _contradictions(raw)
        try:
            params = cls.model_validate(dict(raw))
        except ValidationError as error:
            problems = _field_problems(error, raw) + problems
        if problems:
            first = {problem.key: problem for problem in reversed(problems)}
            raise ParamsError(sorted(first.values(), key=problems.index))
        return params

    @property
    def mode(self) -> Literal["embedded", "gateway"]:
        """How the store is reached: `embedded` in this process, or through a `gateway`."""
        return "gateway" if self.host is not None or self.port is not None else "embedded"

    @property
    def gateway_host(self) -> str | None:
        """The gateway's host, None with an embedded store."""
        return (self.host or DEFAULT_GATEWAY_HOST) if self.mode == "gateway" else None

    @property
    def gateway_port(self) -> int:
        """The gateway's port."""
        return self.port or DEFAULT_GATEWAY_PORT

    @property
    def defaulted(self) -> bool:
        """Whether nothing says where the store is, so that the default place is used."""
        return self.mode == "embedded" and self.store is None

    @property
    def store_paths(self) -> list[str]:
        """The paths of the embedded store, in the order given; empty with a gateway."""
        if self.mode == "gateway":
            return []
        return [DEFAULT_STORE] if self.store is None else _split_paths(self.store)

    @property
    def wanted_fragment_bytes(self) -> int | None:
        """`fragment_bytes` as a number, or None where the store decides."""
        return None if self.fragment_bytes == "auto" else self.fragment_bytes

    @property
    def slot_memory_bytes(self) -> int:
        """Memory of the slots; with `fragment_bytes="auto"` that of a new store."""
        return self.batch_slots * (self.wanted_fragment_bytes or DEFAULT_FRAGMENT_BYTES)


def expects(key: str) -> str:
    """What the parameter `key` takes, in words."""
    extra = AdapterParams.model_fields[key].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["expects"])


def _split_paths(store: str | list[str]) -> list[str]:
    return [path.strip() for path in store.split(",")] if isinstance(store, str) else store


def _contradictions(raw: Mapping[str, object]) -> list[Problem]:
    """What is wrong with the parameters together."""
    problems = []

    def complain(key: str, message: str) -> None:
        if raw.get(key) is not None:
            problems.append(Problem(key, raw[key], message))

    if raw.get("store") is not None:
        for key in ("host", "port"):
            complain(key, f"chooses a gateway, but store={raw['store']!r} is set too; drop one of them")
    elif raw.get("host") is None and raw.get("port") is None:
        for key in ("shm_dir", "token_file"):
            complain(
                key, "is for a gateway, but neither host nor port is set; set one of them or leave it out"
            )
    if raw.get("metrics_port") is None:
        complain(
            "metrics_host", "is where metrics_port listens, but that is not set; set it or leave this out"
        )
    return problems


def _field_problems(error: ValidationError, raw: Mapping[str, object]) -> list[Problem]:
    problems = []
    for detail in error.errors():
        key = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            message = _unknown(key)
        else:
            # A validator's own text, or the field's `expects` where it has none.
            cause = detail.get("ctx", {}).get("error")
            message = str(cause) if cause is not None else ""
            message = message or f"is not {expects(key)}; change it or leave it out"
        problems.append(Problem(key, raw.get(key), message))
    return problems


def _unknown(key: str) -> str:
    known = list(AdapterParams.model_fields)
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    if near:
        return f"is no parameter; did you mean {near[0]}?"
    return f"is no parameter; remove it (there are {', '.join(known)})"
