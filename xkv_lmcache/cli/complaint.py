"""How `xkv` says that it cannot go on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

import click

from xkv_lmcache.cli.exit_codes import ExitCode
from xkv_lmcache.problems import SettingProblem


def fail(text: object, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Print what is wrong and exit."""
    click.echo(f"xkv: {text}", err=True)
    sys.exit(code)


def refuse_settings(problems: Iterable[SettingProblem]) -> NoReturn:
    """Print every problem with the settings and exit."""
    lines = [str(problem) for problem in problems]
    count = f"{len(lines)} {'error' if len(lines) == 1 else 'errors'} in the settings; nothing was started"
    fail("\n  ".join([count, *lines]), ExitCode.USAGE)


def reason(error: OSError | ValueError) -> str:
    """What the native module says, without Python's `[Errno n]`."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)
