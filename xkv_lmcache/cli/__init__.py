"""The command line of the store: `xkv`."""

from __future__ import annotations

from importlib import metadata

import click

from xkv_lmcache.cli.bench import bench
from xkv_lmcache.cli.clear import clear
from xkv_lmcache.cli.gateway import gateway
from xkv_lmcache.cli.ls import ls
from xkv_lmcache.cli.top import top
from xkv_lmcache.cli.verify import verify


@click.group(context_settings={"max_content_width": 110})
@click.version_option(metadata.version("xkv-lmcache"), prog_name="xkv")
def xkv() -> None:
    """The persistent second tier of LMCache, without LMCache: its gateway and its stores."""


xkv.add_command(bench)
xkv.add_command(clear)
xkv.add_command(gateway)
xkv.add_command(ls)
xkv.add_command(top)
xkv.add_command(verify)


def main() -> None:
    """The console script."""
    xkv(prog_name="xkv")
