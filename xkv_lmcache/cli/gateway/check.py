"""`xkv gateway check`: examine a store that nobody has open."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.exit_codes import ExitCode

SHOWN_OBJECTS = 20
"""Damaged objects named in the text; the JSON names more."""


@click.command()
@click.argument("store", nargs=-1, required=True)
@click.option("--repair", is_flag=True, help="Remove damaged objects, mend headers, write the log anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(store: tuple[str, ...], repair: bool, as_json: bool) -> None:
    """Examine a store that no gateway or server has open: headers, log, every manifest, every fragment.

    STORE is each of its drives, files or folders. Nothing is changed without --repair. Exit code 0: no damage,
    or all of it repaired; 1: damage, or the store cannot be examined; 2: wrong usage.
    """
    from xkv_lmcache import _native

    _native.set_up_log(False, "warning")
    paths = [path for each in store for path in each.split(",") if path]
    try:
        with _progress() as progress:
            report: dict[str, Any] = json.loads(_native.check_store(paths, repair, progress))
    except KeyboardInterrupt:
        click.echo("xkv: interrupted; nothing was changed", err=True)
        sys.exit(128 + signal.SIGINT)
    except (OSError, ValueError) as error:
        fail(reason(error))
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else _text(report))
    sys.exit(ExitCode.OK if report["clean"] or report["repaired"] else ExitCode.FAILED)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """What is told how far the examination is: a bar on a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda done, total, damaged: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the log", total=None)

        def tell(done: int, total: int, damaged: int) -> None:
            bar.update(task, completed=done, total=total, description=f"verifying, {damaged} damaged")

        yield tell


def _text(report: dict[str, Any]) -> str:
    gib = 2**30
    lines = [
        f"store {report['store']}: {report['objects']} objects of {report['bytes'] / gib:.2f} GiB",
        f"slots of {report['fragment_bytes']} bytes: {report['slots_used']} of {report['slots_total']} used",
    ]
    for drive in report["drives"]:
        header = "" if drive["header_whole"] else "; ONE COPY OF ITS HEADER IS DAMAGED"
        lines.append(f"drive {drive['name']}: {drive['bytes'] / gib:.2f} GiB{header}")
    if not report["log_found"]:
        lines.append("LOG LOST: neither manifest area holds a log; nothing that was stored can be found")
    for key, text in (
        ("log_damage", "damaged blocks or records of the log; the objects they spoke of are lost"),
        ("objects_overlapping", "objects whose slots belong to newer ones; they are lost"),
        ("objects_implausible", "objects whose manifests cannot be right; they are lost"),
        ("objects_damaged", "objects with bytes that are not what was stored, or cannot be read"),
    ):
        if report[key]:
            lines.append(f"{report[key]} {text}")
    for found in report["damaged"][:SHOWN_OBJECTS]:
        cause = found["error"] or f"{found['fragments_mismatched']} fragments do not match"
        lines.append(f"  {found['digest'][:16]} {found['key'][:80]!r}: {cause}")
    if report["objects_damaged"] > SHOWN_OBJECTS:
        lines.append(f"  and {report['objects_damaged'] - SHOWN_OBJECTS} more (--json)")
    if report["clean"]:
        lines.append("no damage")
    elif report["repaired"]:
        lines.append("repaired: what was damaged is gone, the next store writes it again")
    else:
        lines.append("nothing was changed; --repair removes what is damaged")
    return "\n".join(lines)
