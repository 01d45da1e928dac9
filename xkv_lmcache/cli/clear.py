"""`xkv clear`: empty a namespace, a model's part, or a store."""

from __future__ import annotations

import json
import sys

import click

from xkv_lmcache.cli.complaint import fail, reason
from xkv_lmcache.cli.exit_codes import ExitCode
from xkv_lmcache.cli.gateway.listen import connect_host
from xkv_lmcache.cli.gateway.options import SettingsCommand, configure, settings_options
from xkv_lmcache.cli.gateway.status import FIELDS
from xkv_lmcache.cli.ls import paths_of
from xkv_lmcache.cli.text import byte_text

TIMEOUT_S = 600.0


class ClearCommand(SettingsCommand):
    """`clear`, with the settings that say where a gateway is."""

    fields = FIELDS


@click.command(cls=ClearCommand)
@click.argument("store", nargs=-1)
@click.option("--namespace", metavar="NAME", help="Only objects of this namespace; '' is one, too.")
@click.option("--model", metavar="NAME", help="Only objects of this model, as `xkv ls` shows it.")
@click.option("--all", "everything", is_flag=True, help="All objects.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings_options(FIELDS)
def clear(
    store: tuple[str, ...],
    namespace: str | None,
    model: str | None,
    everything: bool,
    yes: bool,
    config: str | None,
    **options: str | None,
) -> None:
    """Remove the objects of a namespace, of a model, or all; the store stays, and goes on under load.

    STORE is each drive, file or folder of a store that nobody has open. Without it the gateway at --host and --port
    does it, under load if need be; objects that are being stored meanwhile may stay. When it returns, what was
    removed is gone for good. Killed half-way, it leaves each object either there and whole, or removed: run it again.
    Exit code 0: removed; 1: the store or gateway refuses; 2: a setting is wrong.
    """
    if everything == (namespace is not None or model is not None):
        raise click.UsageError("name what to remove: --namespace, --model, both, or --all")
    from xkv_lmcache import _native

    _native.set_up_log(False, "warning")
    paths = paths_of(store)
    configuration = None if paths else configure(config, options, FIELDS)
    if not yes:
        if not sys.stdin.isatty():
            fail("there is no terminal to ask on; add --yes", ExitCode.USAGE)
        what = [
            f"{name} {value!r}"
            for name, value in (("namespace", namespace), ("model", model))
            if value is not None
        ]
        where = (
            ", ".join(paths)
            if configuration is None
            else f"the gateway's store (port {configuration.settings.port})"
        )
        if not click.confirm(f"Remove {' and '.join(what) or 'EVERY object'} from {where}?"):
            fail("nothing was changed")
    try:
        if configuration is None:
            objects, size = _native.clear_store(paths, namespace, model)
        else:
            host, port = connect_host(configuration.settings.host), configuration.settings.port
            text = _native.gateway_clear(host, port, configuration.token, TIMEOUT_S, namespace, model)
            answer = json.loads(text)
            if "error" in answer:
                fail(answer["error"])
            objects, size = answer["objects"], answer["bytes"]
    except (OSError, ValueError) as error:
        fail(reason(error))
    click.echo(f"removed {objects} objects of {byte_text(size)}")
