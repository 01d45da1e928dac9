"""`xkv gateway`: the daemon that owns a store, and what is done to a store while no daemon has it."""

from __future__ import annotations

import click

from xkv_lmcache.cli.gateway.check import check
from xkv_lmcache.cli.gateway.format import format_
from xkv_lmcache.cli.gateway.serve import serve
from xkv_lmcache.cli.gateway.status import status


@click.group()
def gateway() -> None:
    """Serve a store to LMCache's servers of this machine, and look after it."""


for command in (serve, status, check, format_):
    gateway.add_command(command)
