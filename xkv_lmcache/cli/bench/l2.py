"""`xkv bench l2`: adapters side by side, in turns, through LMCache's own factory and event loop."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from xkv_lmcache.cli.bench import adapters, chart, target
from xkv_lmcache.cli.bench.adapters import ADAPTERS, ALL, DEFAULT, GATEWAY, MIB
from xkv_lmcache.cli.bench.gateway import Gateway
from xkv_lmcache.cli.complaint import fail

FRAGMENT_BYTES, DEPTH = 128 * 1024, 32
"""Of fio: what a new store of ours uses."""

SINGLE_LOADS, LOOKUPS = 200, 1000

COLUMNS = {
    "store": "store GB/s",
    "durable": "store+sync GB/s",
    "cold": "load cold GB/s",
    "again": "load again GB/s",
    "store_cpu": "store CPU-s/GB",
    "cpu": "load CPU-s/GB",
    "machine_cpu": "load CPU-s/GB, machine",
    "mixed_load": "load while storing GB/s",
    "kept": "of the same load alone",
    "mixed_store": "store while loading GB/s",
    "p50": "one load p50 us",
    "p99": "one load p99 us",
    "hit": "lookup hit us/key",
    "miss": "lookup miss us/key",
}

EXTRAS = ("fio", "memcpy, one thread")
"""Measured beside the adapters."""

Figures = dict[str, float]
Case = tuple[str, int, int]
"""Folder, bytes of an object, objects of a batch."""


class Worker:
    """The process of one adapter."""

    def __init__(self, name: str, areas: tuple[int, int], log: Path) -> None:
        self.name = name
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xkv_lmcache.cli.bench.worker", *map(str, areas)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=areas,
                text=True,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"},
            )
        self._log = log

    def do(self, name: str, **order: Any) -> dict[str, Any]:
        """Has the worker do something and returns what it measured.

        Raises:
            RuntimeError: it failed, or ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"do": name, **order}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; its last words: {self._log.read_text()[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {name}: {answer['error']}; {self._log.read_text()[-400:]}")
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def turn(worker: Worker, case: Case, count: int, round_: int) -> Figures:
    """One adapter's measurements in one round: new objects are stored, loaded twice, looked up, deleted."""
    _, _, batch = case
    figures: Figures = {}
    stored = worker.do("store", round_=round_, count=count, batch=batch)
    figures.update(store=stored["gb_per_s"], durable=stored["durable_gb_per_s"])
    figures.update(store_cpu=stored["own_cpu_s_per_gb"])
    if worker.name != "floor":
        cold = worker.do("load", round_=round_, count=count, batch=batch, cold=True)
        again = worker.do("load", round_=round_, count=count, batch=batch, cold=False)
        for loaded in (cold, again):
            if loaded["wrong_objects"]:
                raise RuntimeError(
                    f"{worker.name}: {loaded['wrong_objects']} objects came back with other bytes"
                )
        figures.update(cold=cold["gb_per_s"], again=again["gb_per_s"], cpu=again["own_cpu_s_per_gb"])
        figures.update(machine_cpu=again["machine_cpu_s_per_gb"], verified_bytes=again["verified_bytes"])
        if "read_from_drive" in cold:
            figures.update(cold_read_from_drive=cold["read_from_drive"])
        mixed = worker.do("load_while_storing", round_=round_, count=count, batch=batch)
        figures.update(mixed_load=mixed["load_gb_per_s"], mixed_store=mixed["store_gb_per_s"])
        figures.update(kept=mixed["load_gb_per_s"] / mixed["alone_gb_per_s"])
        single = worker.do("one_by_one", round_=round_, count=count, loads=SINGLE_LOADS)
        figures.update(p50=single["p50_us"], p99=single["p99_us"])
    lookup = worker.do("lookup", round_=round_, count=count, repeats=LOOKUPS)
    figures.update(hit=lookup["hit_us_per_key"], miss=lookup["miss_us_per_key"])
    worker.do("delete", round_=round_, count=count)
    return figures


def measure(case: Case, workers: list[Worker], rounds: int, total: int) -> list[dict[str, Figures]]:
    """Per round, the figures of every adapter, of fio and memcpy. Adapters are opened in the order of `workers`. One round
    more is run first and not counted: memory and files are touched for the first time in it."""
    folder, size, batch = case
    count = max(batch, total // size // batch * batch)
    results = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="xkv-bench-") as place, ExitStack() as gateways:
        for worker in workers:
            home = Path(place) / worker.name.replace(" ", "-")
            home.mkdir()
            order: dict[str, Any] = {"folder": str(home), "size": size}
            if worker.name == GATEWAY:
                gateway = gateways.enter_context(Gateway(home, adapters.store_gb(2 * count, size)))
                order.update(spec=adapters.xkv(**gateway.params), helper=gateway.pid)
            else:
                order.update(spec=ADAPTERS[worker.name](home, 2 * count, size))
            worker.do("open", **order)
        for round_ in range(rounds + 1):
            figures: dict[str, Figures] = {}
            # In another order each round, the same in every run: what a turn leaves behind in the drive is to be felt by
            # everybody.
            for worker in random.Random(round_).sample(workers, len(workers)):
                figures[worker.name] = turn(worker, case, count, 2 * round_)
            read, write = (
                target.fio(Path(place), way, total, FRAGMENT_BYTES, DEPTH) for way in ("read", "write")
            )
            if read and write:
                figures[EXTRAS[0]] = {"cold": read, "again": read, "durable": write, "store": write}
                figures[EXTRAS[0]].update(target.fio_mixed(Path(place), total, FRAGMENT_BYTES, DEPTH))
            copied = target.memcpy()
            figures[EXTRAS[1]] = {"again": copied, "store": copied}
            click.echo(f"  round {round_} of {rounds}", err=True)
            results.append(figures)
        for worker in workers:
            worker.do("close")
    return results[1:]


def spread(values: Iterable[float]) -> str:
    """Median, least and greatest."""
    each = sorted(values)
    digits = 0 if statistics.median(each) >= 100 else 2
    return f"{statistics.median(each):.{digits}f} ({each[0]:.{digits}f}-{each[-1]:.{digits}f})"


def columns_of(rounds: list[dict[str, Figures]], name: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for figures in rounds:
        for key, value in figures.get(name, {}).items():
            values[key].append(value)
    return values


def report(case: Case, rounds: list[dict[str, Figures]], ours: list[str]) -> list[Any]:
    """The figures of one case, and the ratios of `ours` to all others, each taken within a round."""
    from rich.table import Table

    folder, size, batch = case
    title = f"{folder}: objects of {size / MIB:g} MiB, batches of {batch}, {len(rounds)} rounds"
    names = [name for name in (*ALL, *EXTRAS) if name in rounds[0]]
    figures = Table("", *names, title=f"{title}; median (min-max)")
    for key, label in COLUMNS.items():
        values = [columns_of(rounds, name)[key] for name in names]
        if any(values):
            figures.add_row(label, *(spread(each) if each else "" for each in values))
    tables = [figures]
    for our in ours:
        others = [name for name in names if name != our]
        ratios = Table("", *others, title=f"{title}; {our} / other, within a round")
        for key, label in COLUMNS.items():
            cells = []
            for name in others:
                pairs = [
                    (figures_[our][key], figures_[name][key])
                    for figures_ in rounds
                    if key in figures_[our] and figures_[name].get(key)
                ]
                cells.append(spread(mine / theirs for mine, theirs in pairs) if pairs else "")
            if any(cells):
                ratios.add_row(label, *cells)
        tables.append(ratios)
    return tables


@click.command()
@click.argument("folder", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--against", default=",".join(DEFAULT), show_default=True, help=f"Of {', '.join(ALL)}.")
@click.option(
    "--mib", "sizes", multiple=True, default=(14.0, 4.0, 1.0), show_default=True, help="MiB of an object."
)
@click.option(
    "--batch", "batches", multiple=True, default=(1, 16, 64), show_default=True, help="Objects at once."
)
@click.option("--rounds", default=5, show_default=True, help="Turns of every adapter.")
@click.option(
    "--total-mib", default=512, show_default=True, help="MiB moved in one go, if a batch is not larger."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="File that gets every figure.")
@click.option(
    "--chart", "chart_path", type=click.Path(dir_okay=False), help="Picture to write: .svg or .png."
)
def l2(
    folder: tuple[str, ...],
    against: str,
    sizes: tuple[float, ...],
    batches: tuple[int, ...],
    rounds: int,
    total_mib: int,
    json_path: str | None,
    chart_path: str | None,
) -> None:
    """Measure L2 adapters side by side below each FOLDER: one process each, in turns, with fio and memcpy between.

    Every load is compared byte by byte with what was stored. Compare the ratios, which are taken within a round; the
    figures themselves change with whatever else the machine does.
    """
    from rich.console import Console

    if chart_path and (package := chart.missing()):
        fail(f"--chart {chart_path}: {package} is not installed; pip install {package}")
    names = [name.strip() for name in against.split(",")]
    if unknown := [name for name in names if name not in ALL]:
        fail(f"--against {', '.join(unknown)}: no such adapter; choose of {', '.join(ALL)}")
    for name in list(names):
        if package := adapters.missing(name):
            click.echo(f"xkv: {name} is left out: {package} is not installed", err=True)
            names.remove(name)
    if shutil.which("fio") is None:
        click.echo("xkv: fio is not installed; there is nothing to compare the drive with", err=True)
    cases = [(place, int(size * MIB), batch) for place in folder for size in sizes for batch in batches]
    largest = max(max(batch, total_mib * MIB // size // batch * batch) * size for _, size, batch in cases)
    areas = (os.memfd_create("stored"), os.memfd_create("loaded"))
    for area in areas:
        os.truncate(area, largest)
    fill(areas[0], largest)
    console = Console(width=None if sys.stdout.isatty() else 200)
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        workers = [Worker(name, areas, Path(logs) / str(number)) for number, name in enumerate(names)]
        try:
            for case in cases:
                click.echo(f"{case[0]}: {case[1] / MIB:g} MiB, batches of {case[2]}", err=True)
                results = measure(case, workers, rounds, total_mib * MIB)
                # Whose file in memory is made first gets what lies apart there, and is slower by up to a fifth.
                workers.reverse()
                place, size, batch = case
                done.append({"folder": place, "object_bytes": size, "batch": batch, "rounds": results})
                for table in report(case, results, [name for name in names if name.startswith("xkv")]):
                    console.print(table)
                if json_path:
                    Path(json_path).write_text(json.dumps(done, indent=1))
                if chart_path:
                    chart.draw(done, Path(chart_path))
        except RuntimeError as error:
            fail(error)
        finally:
            for worker in workers:
                worker.end()


def fill(area: int, total: int) -> None:
    """Fills a memory area with bytes that do not repeat."""
    import numpy as np

    random = np.random.default_rng(1)
    with os.fdopen(os.dup(area), "wb") as file:
        for start in range(0, total, 16 * MIB):
            file.write(random.bytes(min(16 * MIB, total - start)))
