from collections.abc import Sequence
from os import PathLike
from typing import Self

from typing_extensions import disjoint_base

__all__ = ["Connector", "probe_store"]

@disjoint_base
class Connector:
    def __new__(
        cls,
        *,
        store: Sequence[str | PathLike[str]],
        defaulted: bool,
        store_gb: float | None,
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
