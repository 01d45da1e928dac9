"""The launcher's log: structlog on stderr, for people on a terminal and as JSON lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog

from xkv_lmcache_autostart.output import write_patiently


class _Stderr:
    """Standard error for a process that must not stand still or end because nobody reads its log.

    A line that is not taken within the patience is lost, and the next ones get no patience until one is
    taken.
    """

    def __init__(self) -> None:
        self._patience_s = 0.5

    def write(self, text: str) -> int:
        taken = write_patiently(2, text.encode(errors="replace"), self._patience_s)
        self._patience_s = 0.5 if taken else 0.0
        return len(text)

    def flush(self) -> None:
        pass


def set_up(form: str = "auto", level: str = "info") -> None:
    """Log from `level` on; `form` is `console`, `json` or `auto` (console on a terminal)."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_name,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr())),
    )


def get() -> Any:
    """The launcher's logger: `log.get().info("what happened", name=value)`."""
    return structlog.get_logger()


def _add_name(_logger: object, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    first = {name: event.pop(name) for name in ("timestamp", "level", "event")}
    return {**first, "logger": "xkv_lmcache_autostart", **event}
