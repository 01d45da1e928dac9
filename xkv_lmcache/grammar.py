"""The grammar of settings: text in, value out.

Each function takes the text of one setting, stripped and not empty, and returns its value or raises
`ValueError` with what is wrong and the cure; the message reads on after `NAME='text' `. Only the standard
library is needed, so that the launcher can look at `LMC_ENABLE` before it imports anything else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Final, TypeVar, cast

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

T = TypeVar("T")

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})

_NUMBER: Final = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_INTEGER: Final = re.compile(r"[0-9]{1,18}")
_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[A-Za-z]*)")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?\.?")
_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://[^/]+:[0-9]+")

_UNITS: Final = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def check_shape(text: str) -> None:
    """Refuse what is wrong for every setting alike: quotes left on, Kubernetes service links."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
        raise ValueError(
            "has quotes around it that the YAML or compose file left in place; remove them there"
        )
    if _SERVICE_LINK.fullmatch(text):
        raise ValueError(
            "is a Kubernetes service link; set enableServiceLinks: false in the pod, or rename the service"
        )
    if "\0" in text:
        raise ValueError("holds a NUL character; remove it")


def boolean(text: str) -> bool:
    """`1`/`true`/`yes`/`on` or `0`/`false`/`no`/`off`, in any case."""
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("is not a boolean; write 1/true/yes/on or 0/false/no/off")


def integer(text: str) -> int:
    """A whole number of decimal digits, not negative."""
    if not _INTEGER.fullmatch(text):
        raise ValueError("is not a whole number; write digits only, such as 256")
    return int(text)


def count(text: str) -> int:
    """A whole number above 0."""
    value = integer(text)
    if value == 0:
        raise ValueError("must be above 0; write a whole number such as 256")
    return value


def number(text: str) -> float:
    """A decimal number, not negative, without exponent or unit."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(
            "is not a number; write it plainly, such as 10 or 2.5, without sign, exponent or unit"
        )
    return float(text)


def seconds(text: str) -> float:
    """A time in seconds above 0."""
    value = grace(text)
    if value == 0:
        raise ValueError("must be above 0; write a number of seconds such as 10")
    return value


def grace(text: str) -> float:
    """A time in seconds, 0 for none."""
    if not _NUMBER.fullmatch(text):
        raise ValueError("is not a number of seconds; write it plainly, such as 10 or 2.5, without a unit")
    return float(text)


def port(text: str) -> int:
    """A TCP port from 1 to 65535."""
    if not _INTEGER.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise ValueError("is not a port; write a number from 1 to 65535")
    return int(text)


def size(unit: int) -> Callable[[str], float]:
    """A parser of sizes above 0 that returns them in `unit` bytes, which is also what a bare number means."""

    def parse(text: str) -> float:
        match = _SIZE.fullmatch(text)
        scale = _UNITS.get(match["unit"].lower()) if match and match["unit"] else unit
        if match is None or scale is None:
            raise ValueError(
                "is not a size; write a number, or one with a unit such as 512MiB, 1.5GiB or 20GB"
            )
        value = float(match["number"]) * scale / unit
        if value == 0:
            raise ValueError("must be above 0; write a size such as 512MiB, 1.5GiB or 20GB")
        return value

    return parse


def byte_count(text: str) -> int:
    """A whole number of bytes, bare or with a unit (`128KiB`)."""
    value = size(1)(text)
    if value != int(value):
        raise ValueError("is not a whole number of bytes; write one such as 131072 or 128KiB")
    return int(value)


def or_auto(parse: Callable[[str], T]) -> Callable[[str], T | str]:
    """A parser that also takes the word `auto`."""

    def parse_or_auto(text: str) -> T | str:
        if text.lower() == "auto":
            return "auto"
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{error}; or write auto") from None

    return parse_or_auto


def choice(*names: str) -> Callable[[str], str]:
    """A parser of one of `names`, in any case; returns it as spelled in `names`."""
    spelled = {name.lower(): name for name in names}

    def parse(text: str) -> str:
        try:
            return spelled[text.lower()]
        except KeyError:
            raise ValueError(f"is not known; write one of {', '.join(names)}") from None

    return parse


def server_host(text: str) -> str:
    """The host of the LMCache server: a name or an IPv4 address (LMCache cannot do IPv6)."""
    if text.startswith("[") or text.count(":") > 1:
        raise ValueError(
            "is an IPv6 address, which LMCache's server cannot use; write an IPv4 address or a name"
        )
    return gateway_host(text)


def gateway_host(text: str) -> str:
    """A host name, an IPv4 address or an IPv6 address, with or without brackets."""
    if "://" in text:
        raise ValueError("is a URL; write the host alone")
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if inner.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9]+)?", inner):
        return inner
    if ":" in text:
        raise ValueError("has a port in it; write the host alone, the port has a setting of its own")
    if not _HOST.fullmatch(text):
        raise ValueError("is not a host; write a name or an address such as 127.0.0.1")
    return text


def text(text: str) -> str:
    """Any text."""
    return text


def json_object(text: str) -> dict[str, object]:
    """A JSON object without duplicate names."""
    value = _json(text)
    if not isinstance(value, dict):
        raise ValueError('is JSON, but no object; write {"name": value, ...}')
    return value


def json_adapters(text: str) -> list[dict[str, object]]:
    """A JSON object or an array of them, each an L2 adapter with a `type`."""
    value = _json(text)
    adapters = value if isinstance(value, list) else [value]
    for adapter in adapters:
        if not isinstance(adapter, dict) or not isinstance(adapter.get("type"), str):
            raise ValueError('is no L2 adapter; write {"type": "...", ...} or an array of such objects')
    return cast(list[dict[str, object]], adapters)


def shell_words(text: str) -> list[str]:
    """Words, split as a shell would; nothing is expanded."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into arguments ({error}); balance the quotes") from None


def names(text: str) -> list[str]:
    """Names or patterns, separated by commas or blanks."""
    return [name for name in re.split(r"[,\s]+", text) if name]


def paths(text: str) -> list[str]:
    """Paths, separated by commas, none twice."""
    found = [path.strip() for path in text.split(",")]
    if not all(found):
        raise ValueError("names an empty path; remove the superfluous comma or name a path")
    if any(path.startswith("~") for path in found):
        raise ValueError("starts with ~, which nothing expands here; write the whole path")
    if len(set(found)) != len(found):
        raise ValueError("names a path twice; name each drive once")
    return found


def hosts(text: str) -> list[str]:
    """Hosts as of `gateway_host`, separated by commas."""
    found = [host.strip() for host in text.split(",")]
    if not all(found):
        raise ValueError("names an empty host; remove the superfluous comma or name a host")
    return [gateway_host(host) for host in found]


def between(parse: Callable[[str], int | float], low: float, high: float) -> Callable[[str], int | float]:
    """A parser of numbers from `low` to `high`."""

    def parse_between(text: str) -> int | float:
        value = parse(text)
        if not low <= value <= high:
            raise ValueError(f"is not between {low:g} and {high:g}; write a number in between")
        return value

    return parse_between


def _json(text: str) -> object:
    def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"names {twice!r} twice; keep one")
        return result

    def refuse_constant(word: str) -> object:
        raise ValueError(f"holds {word}, which is no JSON; write a number")

    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        cure = "write names and text in double quotes" if "'" in text else 'write {"name": value, ...}'
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos + 1}); {cure}") from None
    except RecursionError:
        raise ValueError('is nested too deeply; write {"name": value, ...}') from None
