"""Options and help of the gateway's settings, made from their declaration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from xkv_lmcache.cli.complaint import refuse_settings
from xkv_lmcache.gateway_settings import CONFIG, SETTINGS, Configuration, load
from xkv_lmcache.problems import SettingsError


class SettingsCommand(click.Command):
    """A command whose help lists its settings with option, variable, type and default."""

    fields: tuple[str, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the settings."""
        rows = [
            row
            for param in self.get_params(ctx)
            if param.name not in self.fields and (row := param.get_help_record(ctx))
        ]
        with formatter.section("Options"):
            formatter.write_dl(rows)
        settings = [SETTINGS[field] for field in self.fields]
        with formatter.section(
            "Settings (options go before variables, those before the file; empty is unset)"
        ):
            formatter.write_dl(
                [(f"{each.option}, {each.variable}", each.help) for each in settings], col_max=0
            )


def settings_options(fields: Iterable[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options for the settings `fields`, and for the file that has them; see `configure`."""
    fields = tuple(fields)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(fields):
            function = click.option(SETTINGS[field].option, field, metavar="TEXT", default=None)(function)
        return click.option(
            "--config", metavar="FILE", help=f"TOML file with settings, such as port = 5557; also {CONFIG}."
        )(function)

    return decorate


def configure(
    config: str | None, options: dict[str, str | None], fields: Iterable[str] | None = None
) -> Configuration:
    """The settings from the command line, the environment and the file. Exits with every error there is."""
    given = {field: text for field, text in options.items() if text is not None}
    try:
        return load(os.environ, given, config, fields)
    except SettingsError as error:
        refuse_settings(error.problems)
