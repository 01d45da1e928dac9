from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Self, final

from typing_extensions import disjoint_base

__all__ = [
    "Connector",
    "Gateway",
    "Trial",
    "check_store",
    "clear_store",
    "format_store",
    "gateway_clear",
    "gateway_list",
    "gateway_status",
    "list_store",
    "log",
    "probe_store",
    "set_up_log",
    "survey_store",
]

@disjoint_base
class Connector:
    def __new__(
        cls,
        *,
        store: Sequence[str | PathLike[str]],
        defaulted: bool,
        store_gb: float | None,
        host: str | None,
        port: int,
        shm_dir: str | PathLike[str],
        token_file: str | PathLike[str] | None,
        reopen_after_s: float,
        fragment_bytes: int | None,
        batch_slots: int,
        copy_threads: int | None,
        verify: str,
        wait_timeout_s: float,
        load_deadline_s: float,
        store_deadline_s: float,
        max_pending_store_mb: float,
        namespace: str,
        stats_interval_s: float,
        stats_path: str | PathLike[str] | None,
        io_engine: str,
        direct_io: str,
    ) -> Self: ...
    def event_fd(self) -> int: ...
    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int: ...
    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int: ...
    def submit_batch_exists(self, keys: list[str]) -> int: ...
    def submit_batch_delete(self, keys: list[str]) -> int: ...
    def drain_completions(self) -> list[tuple[int, bool, str, list[bool] | None]]: ...
    def close(self) -> None: ...
    def stats_json(self) -> str: ...

def probe_store(
    paths: Sequence[str | PathLike[str]], store_gb: float | None = None, fragment_bytes: int | None = None
) -> None: ...

@final
class Gateway:
    def __new__(
        cls,
        *,
        store: Sequence[str | PathLike[str]],
        store_gb: float,
        fragment_bytes: int | None,
        io_engine: str,
        direct_io: str,
        depth: int,
        listen: Sequence[str],
        token: str | None,
        shm_dir: str | PathLike[str],
        socket_mode: int,
        socket_group: int | None,
        share_drives: str,
        max_sessions: int,
        max_slots: int,
        heartbeat_s: float,
        client_silence_s: float,
    ) -> Self: ...
    def addresses(self) -> list[str]: ...
    def status_json(self) -> str | None: ...
    def close(self, patience_s: float) -> None: ...

def gateway_status(host: str, port: int, token: str | None, timeout_s: float) -> str: ...
def gateway_list(host: str, port: int, token: str | None, timeout_s: float) -> str: ...
def gateway_clear(
    host: str, port: int, token: str | None, timeout_s: float, namespace: str | None, model: str | None
) -> str: ...
def list_store(paths: Sequence[str | PathLike[str]]) -> str: ...
def clear_store(
    paths: Sequence[str | PathLike[str]], namespace: str | None, model: str | None
) -> tuple[int, int]: ...
def check_store(
    paths: Sequence[str | PathLike[str]], repair: bool, progress: Callable[[int, int, int], object]
) -> str: ...
def survey_store(paths: Sequence[str | PathLike[str]]) -> list[tuple[Path, str, str]]: ...
def format_store(
    paths: Sequence[str | PathLike[str]], store_gb: float | None, fragment_bytes: int | None, force: bool
) -> str: ...

@final
class Trial:
    def __new__(cls, path: str | PathLike[str], *, span_bytes: int, read_only: bool, force: bool) -> Self: ...
    def found(self) -> tuple[str, str]: ...
    def span(self) -> tuple[int, int]: ...
    def is_direct(self) -> bool: ...
    def in_memory(self) -> bool: ...
    def fileno(self) -> int: ...
    def fill(self) -> None: ...
    def measure(
        self, op: str, order: str, block_bytes: int, depth: int, io_engine: str, seconds: float
    ) -> tuple[int, float, float, str]: ...
    def close(self) -> None: ...

def set_up_log(json: bool, level: str) -> None: ...
def log(level: str, text: str) -> None: ...
