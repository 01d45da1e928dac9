"""`xkv gateway format`: make a new store."""

from __future__ import annotations

import sys
from typing import Any

import click

from xkv_lmcache.cli.complaint import fail, reason, refuse_settings
from xkv_lmcache.cli.exit_codes import ExitCode
from xkv_lmcache.gateway_settings import SETTINGS, load
from xkv_lmcache.problems import SettingsError


@click.command(name="format")
@click.argument("store", nargs=-1, required=True)
@click.option("--store-gb", metavar="SIZE", help=f"{SETTINGS['store_gb'].help}.")
@click.option("--fragment-bytes", metavar="BYTES", help=f"{SETTINGS['fragment_bytes'].help}.")
@click.option("--force", is_flag=True, help="Destroy what is there: another store, a filesystem, anything.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def format_(
    store: tuple[str, ...], store_gb: str | None, fragment_bytes: str | None, force: bool, yes: bool
) -> None:
    """Make a new, empty store.

    STORE is each of its drives, files or folders; a folder that does not exist is made, and gets a file. Files
    that exist keep their size without --store-gb. What is not blank is refused without --force. `serve` does the
    same on blank drives by itself.
    """
    from xkv_lmcache import _native

    _native.set_up_log(False, "warning")
    options: dict[str, Any] = {
        "store": ",".join(store),
        "store_gb": store_gb,
        "fragment_bytes": fragment_bytes,
    }
    options = {field: text for field, text in options.items() if text is not None}
    try:
        settings = load({}, options, fields=("store", "store_gb", "fragment_bytes")).settings
    except SettingsError as error:
        refuse_settings(error.problems)
    try:
        found = _native.survey_store(settings.store)
    except (OSError, ValueError) as error:
        fail(reason(error))
    for path, _, text in found:
        click.echo(f"{path}: {text}", err=True)
    taken = [path for path, kind, _ in found if kind in ("store", "foreign")]
    if taken and not force:
        fail(f"{', '.join(map(str, taken))}: not blank; name blank drives, or destroy it with --force")
    if not yes:
        if not sys.stdin.isatty():
            fail("there is no terminal to ask on; add --yes", ExitCode.USAGE)
        if not click.confirm("DESTROY what is there and make a new store?" if taken else "Make a new store?"):
            fail("nothing was changed")
    try:
        made = _native.format_store(
            settings.store,
            None if store_gb is None else settings.store_gb,
            settings.wanted_fragment_bytes,
            force,
        )
    except (OSError, ValueError) as error:
        fail(reason(error))
    click.echo(made)
