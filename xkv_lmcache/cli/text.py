"""Figures for people."""

from __future__ import annotations


def byte_text(count: float) -> str:
    """Bytes in the largest unit that leaves a figure of 1 or more: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration_text(seconds: float) -> str:
    """A time in its two largest units: `2 h 5 min`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def share_text(part: float, whole: float) -> str:
    """A share in percent; `-` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
