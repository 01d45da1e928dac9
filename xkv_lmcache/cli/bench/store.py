"""`xkv bench store`: the I/O engine alone beside fio, for choosing fragment size, depth and engine on new hardware."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xkv_lmcache.cli.bench.choice import advice, best, tables
from xkv_lmcache.cli.bench.target import MIB
from xkv_lmcache.cli.bench.trial import (
    ENGINES,
    FIO,
    OPERATIONS,
    Case,
    Round,
    TrialError,
    drive,
    refusal,
    turns,
)
from xkv_lmcache.cli.complaint import fail, reason, refuse_settings
from xkv_lmcache.cli.exit_codes import ExitCode
from xkv_lmcache.cli.text import byte_text
from xkv_lmcache.gateway_settings import load
from xkv_lmcache.problems import SettingsError

if TYPE_CHECKING:
    from xkv_lmcache._native import Trial

MAX_MEMORY = 1024 * MIB
"""Of the fragments that are under way."""


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--fragment-bytes", "fragments", multiple=True, default=("128KiB", "512KiB", "1MiB"), show_default=True
)
@click.option(
    "--depth",
    "depths",
    multiple=True,
    type=click.IntRange(1, 4096),
    default=(8, 32, 64),
    show_default=True,
    help="I/Os at once; of the pool 16 at most.",
)
@click.option(
    "--io-engine",
    "engines",
    multiple=True,
    type=click.Choice(list(ENGINES)),
    default=tuple(ENGINES),
    show_default=True,
)
@click.option(
    "--mib",
    type=click.IntRange(16),
    default=1024,
    show_default=True,
    help="MiB of the drive, or of the file in a folder, that are used.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Of each measurement.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of everybody.")
@click.option("--read-only", is_flag=True, help="Measure reads only, and write nothing.")
@click.option("--force", is_flag=True, help="Destroy what is there: a store, a filesystem, anything.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that gets every figure.",
)
def store(
    path: Path,
    fragments: tuple[str, ...],
    depths: tuple[int, ...],
    engines: tuple[str, ...],
    mib: int,
    seconds: float,
    rounds: int,
    read_only: bool,
    force: bool,
    json_path: Path | None,
) -> None:
    """Measure the store's I/O engine on PATH beside fio: reads and writes of whole fragments, in and out of order.

    PATH is a folder, in which a file is made that has no name and does not outlive the command; or a block device or a
    file, which is locked meanwhile. What is not blank is refused without --read-only or --force. The first and the last
    MiB stay as they are, so that a blank drive is still blank to `xkv gateway serve`; after --force it is, too. At the end
    one line says which settings were best.
    """
    from xkv_lmcache import _native

    _native.set_up_log(False, "warning")
    if read_only and (force or path.is_dir()):
        what = "--force" if force else f"{path}, a folder, where a file would be made"
        fail(f"--read-only writes nothing; leave it out, or {what}", ExitCode.USAGE)
    sizes = fragment_bytes(fragments)
    if (memory := max(sizes) * max(depths)) > MAX_MEMORY:
        most = byte_text(MAX_MEMORY)
        fail(
            f"--depth times --fragment-bytes come to {byte_text(memory)}; take {most} at most", ExitCode.USAGE
        )
    cases = [
        Case(operation, size, depth)
        for operation in OPERATIONS
        if not read_only or operation.endswith("read")
        for size in sizes
        for depth in sorted(set(depths))
    ]
    try:
        with drive(path, mib * MIB, read_only=read_only, force=force) as trial:
            say_what_is_there(path, trial, read_only)
            refused = {engine: why for engine in ENGINES if (why := refusal(trial, engine))}
            for engine in set(engines) & set(refused):
                click.echo(f"xkv: {engine} is left out: {reason(refused[engine])}", err=True)
            measured = [engine for engine in ENGINES if engine in engines and engine not in refused]
            if not measured:
                fail("no engine is left to measure")
            if not (fio := shutil.which("fio") is not None):
                click.echo("xkv: fio is not installed; there is nothing to compare with", err=True)
            everybody = [*measured, FIO] if fio else measured
            fio_engine = "libaio" if "uring" in refused else "io_uring"
            if not read_only:
                trial.fill()
            done: list[Round] = []
            for number in range(rounds):
                done.append(turns(trial, cases, everybody, seconds, number, fio_engine))
                click.echo(f"  round {number + 1} of {rounds}", err=True)
    except TrialError as error:
        fail(error)
    report(path, done, measured, fio, json_path)


def fragment_bytes(texts: tuple[str, ...]) -> list[int]:
    """The sizes, checked as the setting is."""
    sizes = set()
    for text in texts:
        try:
            settings = load({}, {"fragment_bytes": text}, fields=["fragment_bytes"]).settings
        except SettingsError as error:
            refuse_settings(error.problems)
        if settings.wanted_fragment_bytes is None:
            fail("--fragment-bytes=auto is no size; name one such as 128KiB", ExitCode.USAGE)
        sizes.add(settings.wanted_fragment_bytes)
    return sorted(sizes)


def say_what_is_there(path: Path, trial: Trial, read_only: bool) -> None:
    """What happens to what was found, and what the figures will not be."""
    kind, text = trial.found()
    if kind != "blank":
        click.echo(f"xkv: {path}: {text}; {'only read' if read_only else 'destroyed'}", err=True)
    elif read_only:
        click.echo(f"xkv: {path}: blank; a drive may answer faster where nothing was ever written", err=True)
    if trial.in_memory() or not trial.is_direct():
        click.echo(f"xkv: {path}: direct I/O reaches no drive here; memory is measured", err=True)


def report(path: Path, rounds: list[Round], engines: list[str], fio: bool, json_path: Path | None) -> None:
    """Prints the figures and the choice, and writes them."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 100)
    for title, table in tables(path, rounds, engines, fio):
        click.echo(title)
        console.print(table)
    click.echo(advice(rounds, engines, fio))
    if json_path:
        choice, share = best(rounds, engines)
        every = [[{**asdict(case), **figures} for case, figures in round_.items()] for round_ in rounds]
        figures = {"path": str(path), "best": {**asdict(choice), "share": share}, "rounds": every}
        json_path.write_text(json.dumps(figures, indent=1))
