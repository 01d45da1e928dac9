"""The JSON Schema of the statistics, and the reference page's tables, which are written from it.

`python3 -m xkv_lmcache.stats_schema` prints the tables for docs/stats.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `stats_path` gets."""
    text = resources.files("xkv_lmcache").joinpath("stats.schema.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def markdown() -> str:
    """Every field of the statistics with its type and meaning, as a table."""
    rows = ["| field | type | meaning |", "|---|---|---|"]
    rows += [f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in _fields(schema(), "")]
    return "\n".join(rows) + "\n"


def _fields(found: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    for name, field in found.get("properties", {}).items():
        if path == "operations." and name != "get":
            continue
        where = path + (name if path != "operations." else "<operation>")
        meaning = (
            field["description"] if path != "operations." else "`get`, `set`, `exists` and `delete`, each:"
        )
        yield where, _kind(field), meaning
        inner = field.get("items", field)
        yield from _fields(inner, where + ("[]." if "items" in field else "."))


def _kind(field: Mapping[str, Any]) -> str:
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return " or ".join(f"`{each}`" for each in field["enum"])
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return " or ".join(kinds)


if __name__ == "__main__":
    print(markdown(), end="")
