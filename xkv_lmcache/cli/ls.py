"""`xkv ls`: what is in a store, by namespace and model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.gateway.listen import connect_host
from xkv_lmcache.cli.gateway.options import SettingsCommand, configure, settings_options
from xkv_lmcache.cli.gateway.status import FIELDS
from xkv_lmcache.cli.text import byte_text, duration_text, share_text

TIMEOUT_S = 60.0
"""A store of very many objects takes a while to be counted."""

SHARES = ("objects", "bytes", "slots", "never_read", "never_read_bytes")


class LsCommand(SettingsCommand):
    """`ls`, with the settings that say where a gateway is."""

    fields = FIELDS


def paths_of(store: tuple[str, ...]) -> list[str]:
    """The drives that were named, also with commas."""
    return [path for each in store for path in each.split(",") if path]


@click.command(cls=LsCommand)
@click.argument("store", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the listing as JSON.")
@settings_options(FIELDS)
def ls(store: tuple[str, ...], as_json: bool, config: str | None, **options: str | None) -> None:
    """Show what is in a store: objects, bytes and ages by namespace and model, and how much was never read.

    STORE is each drive, file or folder of a store that nobody has open. Without it the gateway at --host and --port
    is asked. Nothing is changed. Exit code 0: listed; 1: the store or gateway refuses; 2: a setting is wrong.
    """
    from xkv_lmcache import _native

    _native.set_up_log(False, "warning")
    try:
        if paths := paths_of(store):
            text = _native.list_store(paths)
        else:
            configuration = configure(config, options, FIELDS)
            settings = configuration.settings
            host = connect_host(settings.host)
            text = _native.gateway_list(host, settings.port, configuration.token, TIMEOUT_S)
    except (OSError, ValueError) as error:
        fail(reason(error))
    listing: dict[str, Any] = json.loads(text)
    if as_json:
        click.echo(json.dumps(listing, indent=2, ensure_ascii=False))
    else:
        _show(listing)


def _show(listing: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    usage, size = listing["usage"], listing["fragment_bytes"]
    total = {name: sum(each[name] for each in usage) for name in SHARES}
    console.print(
        f"store {listing['store']}: {total['objects']} objects of {byte_text(total['bytes'])}, "
        f"{byte_text(total['slots'] * size)} of {byte_text(listing['slots_total'] * size)} used, "
        f"{share_text(total['never_read_bytes'], total['bytes'])} of the bytes never read"
    )
    if not usage:
        return

    def age(time_us: int) -> str:
        return duration_text(max(listing["time_us"] - time_us, 0) / 1e6)

    table = Table(
        "namespace",
        "model",
        "objects",
        "bytes",
        "used last",
        "used first",
        "never read",
        box=None,
        pad_edge=False,
    )
    for each in usage:
        # Names come from clients: as they are, never as markup.
        table.add_row(
            Text(each["namespace"] or "-"),
            Text(each["model"]),
            str(each["objects"]),
            byte_text(each["bytes"]),
            f"{age(each['newest_use_us'])} ago",
            f"{age(each['oldest_use_us'])} ago",
            share_text(each["never_read_bytes"], each["bytes"]),
        )
    console.print(table)
    if listing["left_out"]:
        console.print(f"and {listing['left_out']} smaller ones")
