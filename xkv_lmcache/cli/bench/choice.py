"""From the figures of `xkv bench store` to the settings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xkv_lmcache.cli.bench.l2 import spread
from xkv_lmcache.cli.bench.trial import ENGINES, FIO, OPERATIONS, Case, Round
from xkv_lmcache.gateway_settings import SETTINGS

NEAR = 0.95
"""Of the best: a difference that is not worth larger fragments or a deeper queue."""

EMBEDDED_DEPTH = 32
"""An embedded store has no setting for it."""


@dataclass(frozen=True)
class Choice:
    """What to set."""

    fragment_bytes: int
    depth: int
    io_engine: str


def best(rounds: list[Round], engines: list[str]) -> tuple[Choice, float]:
    """The smallest fragments, then the least depth, then the first engine, that come near the best; and how near: the
    mean, over the operations, of the rate as a share of the highest one."""
    shares: dict[Choice, list[float]] = {}
    for operation in dict.fromkeys(case.operation for case in rounds[0]):
        rates = {
            Choice(case.fragment_bytes, case.depth, engine): statistics.median(
                figures[case][engine]["gb_per_s"] for figures in rounds
            )
            for case in rounds[0]
            if case.operation == operation
            for engine in engines
        }
        for choice, rate in rates.items():
            shares.setdefault(choice, []).append(rate / (max(rates.values()) or 1))
    means = {choice: statistics.fmean(each) for choice, each in shares.items()}
    near = [choice for choice, mean in means.items() if mean >= NEAR * max(means.values())]
    chosen = min(near, key=lambda choice: (choice.fragment_bytes, choice.depth))
    return chosen, means[chosen]


def ratios(rounds: list[Round], case: Case, engine: str) -> list[float]:
    """Of our rate to fio's, within each round."""
    rates = [(figures[case][engine]["gb_per_s"], figures[case][FIO]["gb_per_s"]) for figures in rounds]
    return [ours / fio for ours, fio in rates if fio]


def tables(path: Path, rounds: list[Round], engines: list[str], fio: bool) -> Iterator[tuple[str, Any]]:
    """Title and figures of each operation, 80 columns wide."""
    from rich.table import Table

    for operation in dict.fromkeys(case.operation for case in rounds[0]):
        table = Table("fragment", "depth", "engine", "GB/s", "of fio", "CPU-s/GB")
        for case in (case for case in rounds[0] if case.operation == operation):
            names = [str(case.fragment_bytes), str(case.depth)]
            for engine in [*engines, FIO] if fio else engines:
                figures = [round_[case][engine] for round_ in rounds]
                against = ratios(rounds, case, engine) if fio and engine != FIO else []
                table.add_row(
                    *names,
                    ENGINES.get(engine, engine),
                    spread(each["gb_per_s"] for each in figures),
                    spread(against) if against else "",
                    f"{statistics.median(each['cpu_s_per_gb'] for each in figures):.3f}",
                )
                names = ["", ""]
            table.add_section()
        yield f"{path}: {OPERATIONS[operation]}, {len(rounds)} rounds; median (min-max)", table


def advice(rounds: list[Round], engines: list[str], fio: bool) -> str:
    """Which settings were best, and where they are set: one line."""
    choice, share = best(rounds, engines)
    settings = {"fragment_bytes": choice.fragment_bytes, "depth": choice.depth, "io_engine": choice.io_engine}
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    text = f"Best here: {text}, {share:.2f} of the highest rates"
    if fio:
        cases = [Case(operation, choice.fragment_bytes, choice.depth) for operation in OPERATIONS]
        against = [ratios(rounds, case, choice.io_engine) for case in cases if case in rounds[0]]
        if every := [ratio for each in against for ratio in each]:
            text += f", {spread(every)} of fio"
    gateway = " ".join(f"{SETTINGS[name].variable}={value}" for name, value in settings.items())
    params = json.dumps({"io_engine": choice.io_engine})
    embedded = f"LMC_XKV_FRAG={choice.fragment_bytes} LMC_XKV_PARAMS='{params}'"
    return (
        f"{text}. A gateway takes {gateway}; an embedded store {embedded}, its depth is {EMBEDDED_DEPTH}. "
        "A store keeps the fragment_bytes it was made with."
    )
