"""`xkv bench growth`: what lookups, loads, stores, memory and restarts cost as a store grows."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from xkv_lmcache.cli.bench.growth_worker import BATCH, OBJECT_BYTES, serve
from xkv_lmcache.cli.complaint import fail

COSTS = {
    "hit_us": "lookup hit us/key",
    "miss_us": "lookup miss us/key",
    "wrapped_hit_us": "lookup hit through LMCache us/key",
    "wrapped_miss_us": "lookup miss through LMCache us/key",
    "load_us": "load us/key",
    "store_us": "store us/key",
}

CHECKED_BATCHES = 16

TURNS = 10
"""Times that each store is measured, between the others."""

Figures = dict[str, float]


class Child:
    """The process with the connector, from its opening of the store on."""

    def __init__(self, store: Path, store_gb: float) -> None:
        # A fresh interpreter: what the store takes must not be mixed with what this process has.
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, str(store), store_gb), daemon=True)
        self._process.start()
        theirs.close()
        self.opened = self._answer()

    def _answer(self) -> Figures:
        try:
            answer: tuple[Figures, str | None] = self._orders.recv()
        except EOFError:
            raise RuntimeError("the process with the store ended") from None
        figures, error = answer
        if error is not None:
            raise RuntimeError(error)
        return figures

    def do(self, name: str, **arguments: Any) -> Figures:
        """Has it do something and returns what it measured.

        Raises:
            RuntimeError: it failed, or ended.
        """
        self._orders.send((name, arguments))
        return self._answer()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()


def measure(folder: Path, sizes: list[int], samples: int) -> list[Figures]:
    """Fills a store to each of `sizes`; the costs of all of them, in turns, since drives and machines change their pace;
    then for each a kill -9, the restart, and what came back."""
    # A quarter of the file is manifest log, and the evictor keeps some slots free.
    store_gb = max(0.1, (sizes[-1] * 1.1 + 4096) * OBJECT_BYTES / 0.74 / (1 << 30))
    results: list[Figures] = [{"objects": size} for size in sizes]
    children: list[Child] = []
    try:
        for size, figures in zip(sizes, results, strict=True):
            children.append(Child(folder / str(size), store_gb))
            figures.update(children[-1].do("fill", first=0, last=size))
            click.echo(f"  {size} objects stored", err=True)
        # The wrapper last, as LMCache's modules take memory.
        for order in ("measure", "measure_wrapped"):
            _in_turns(order, children, results, -(-samples // TURNS))
        for size, child, figures in zip(sizes, children, results, strict=True):
            figures["machine_load"] = os.getloadavg()[0]
            child.kill()
            _reopen(folder / str(size), store_gb, figures)
            click.echo(f"  {size} objects found again after a kill -9", err=True)
    finally:
        for child in children:
            child.kill()
    for figures in results:
        grown = figures["objects"] - results[0]["objects"]
        if grown:
            for which in ("resident_bytes", "open_resident_bytes"):
                figures[f"{which}_per_object"] = (figures[which] - results[0][which]) / grown
        figures.update({f"{cost}_ratio": figures[cost] / results[0][cost] for cost in COSTS})
    return results


def _in_turns(order: str, children: list[Child], results: list[Figures], samples: int) -> None:
    """Has each of `children` measure `TURNS` times, one after the other; the medians go to `results`."""
    taken: list[list[Figures]] = [[] for _ in children]
    for _ in range(TURNS):
        for child, figures, mine in zip(children, results, taken, strict=True):
            mine.append(child.do(order, objects=int(figures["objects"]), samples=samples))
    for figures, mine in zip(results, taken, strict=True):
        figures.update({name: statistics.median(each[name] for each in mine) for name in mine[0]})


def _reopen(store: Path, store_gb: float, figures: Figures) -> None:
    """Opens a store whose process was killed, and looks whether all of it is there.

    Raises:
        RuntimeError: it is not.
    """
    size = figures["objects"]
    child = Child(store, store_gb)
    try:
        figures.update(child.opened, open_resident_bytes=child.do("memory")["resident_bytes"])
        figures["open_s_per_million"] = figures["open_s"] / size * 1e6
        checked = child.do("check", objects=int(size), batches=CHECKED_BATCHES)
        if checked["objects"] != size:
            raise RuntimeError(f"{checked['objects']:g} objects after the restart, not {size:g}")
        figures["checked_objects"] = checked["checked"]
        child.do("close")
    finally:
        child.kill()


def report(folder: str, results: list[Figures]) -> Any:
    from rich.table import Table

    title = (
        f"{folder}: objects of {OBJECT_BYTES} bytes, batches of {BATCH}; in brackets: to the smallest store"
    )
    table = Table("", *(f"{each['objects']:,.0f}" for each in results), title=title)
    for cost, label in COSTS.items():
        table.add_row(label, *(f"{each[cost]:.2f} ({each[f'{cost}_ratio']:.2f})" for each in results))
    rows = {
        "resident MiB": ("resident_bytes", 1 / (1 << 20), 1),
        "bytes of memory per object": ("resident_bytes_per_object", 1, 0),
        "the same after the restart": ("open_resident_bytes_per_object", 1, 0),
        "restart after kill -9, s": ("open_s", 1, 3),
        "restart, CPU-s": ("open_cpu_s", 1, 3),
        "restart, s per million objects": ("open_s_per_million", 1, 2),
        "load of the machine": ("machine_load", 1, 1),
    }
    for label, (name, scale, digits) in rows.items():
        cells = (f"{each[name] * scale:.{digits}f}" if name in each else "" for each in results)
        table.add_row(label, *cells)
    return table


@click.command()
@click.argument("folder", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@click.option(
    "--objects", default="1000,100000,1000000", show_default=True, help="Sizes of the stores, growing."
)
@click.option("--samples", default=200, show_default=True, help="Batches of each kind; the median counts.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="File that gets every figure.")
def growth(folder: tuple[str, ...], objects: str, samples: int, json_path: str | None) -> None:
    """Measure how costs grow with the number of objects in a store below each FOLDER.

    A store is filled to each of the sizes with objects of one fragment of 4 KiB. Of each, in turns: microseconds per key
    of lookups, loads and durable stores of keys from all over the store; memory; then the process is killed, the store is
    opened again, the objects are counted, and some of them compared byte by byte. A million objects take about 6 GiB of
    the folder.
    """
    from rich.console import Console

    try:
        sizes = [int(size) for size in objects.split(",")]
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < BATCH or sizes != sorted(set(sizes)):
        fail(f"--objects {objects}: give growing numbers from {BATCH} on, such as 1000,100000")
    console = Console(width=None if sys.stdout.isatty() else 120)
    done: list[dict[str, Any]] = []
    for place in folder:
        click.echo(f"{place}: {objects} objects", err=True)
        with tempfile.TemporaryDirectory(dir=place, prefix="xkv-bench-") as home:
            try:
                results = measure(Path(home), sizes, samples)
            except RuntimeError as error:
                fail(error)
        done.append({"folder": place, "object_bytes": OBJECT_BYTES, "batch": BATCH, "sizes": results})
        console.print(report(place, results))
        if json_path:
            Path(json_path).write_text(json.dumps(done, indent=1))
