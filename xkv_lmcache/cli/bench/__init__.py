"""`xkv bench`: how fast an L2 adapter of LMCache is, beside others and beside the drive itself; the store's engine alone."""

from __future__ import annotations

import click

from xkv_lmcache.cli.bench.growth import growth
from xkv_lmcache.cli.bench.l2 import l2
from xkv_lmcache.cli.bench.store import store


@click.group()
def bench() -> None:
    """Measure adapters and drives."""


bench.add_command(growth)
bench.add_command(l2)
bench.add_command(store)
