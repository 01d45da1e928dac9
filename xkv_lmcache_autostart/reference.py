"""The reference of the settings, written from their declaration: for `--help` and for docs/settings.md."""

from __future__ import annotations

from collections.abc import Iterable

from xkv_lmcache_autostart.command import compact, plain
from xkv_lmcache_autostart.exit_codes import ExitCode
from xkv_lmcache_autostart.settings import VARIABLES, Variable

EXIT_CODES = {
    ExitCode.OK: "the command succeeded, or there was nothing to fail",
    ExitCode.START_FAILED: "the machine cannot run the server as configured, or it did not become ready",
    ExitCode.BAD_SETTINGS: "a setting or an option is wrong; nothing was started",
    ExitCode.SERVER_LOST: "the server died under the command, and LMC_ON_SERVER_EXIT=exit",
    ExitCode.CHECK_WARNED: "--check has warnings and no failure (1 with a failure)",
    ExitCode.NOT_EXECUTABLE: "the command cannot be executed",
    ExitCode.NOT_FOUND: "the command does not exist",
}
"""The launcher's own exit codes; otherwise it exits with the command's, or 128 + n on signal n."""


def help_rows() -> Iterable[tuple[str, str]]:
    """For each setting its names, and what there is to say about it."""
    for variable in VARIABLES.values():
        sets = f"; sets {variable.param}" if variable.param else ""
        yield (
            f"{variable.option}, {variable.name}",
            f"{variable.meaning} ({variable.kind}; default: {default_text(variable)}{sets})",
        )


def markdown() -> str:
    """The reference page."""
    rows = [
        "| variable | option | type | default | meaning | adapter parameter |",
        "|---|---|---|---|---|---|",
    ]
    for variable in VARIABLES.values():
        param = f"`{variable.param}`" if variable.param else ""
        cells = (
            f"`{variable.name}`",
            f"`{variable.option}`",
            variable.kind,
            default_text(variable),
            variable.meaning,
            param,
        )
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    codes = ["| code | meaning |", "|---|---|"]
    codes += [f"| {code.value} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(
        [
            "# Settings",
            "",
            "Generated from the declaration in `xkv_lmcache_autostart/settings.py` by",
            "`python3 -m xkv_lmcache_autostart --print settings`. Options go before the environment, that",
            "before the defaults; `LMC_XKV_PARAMS` is merged last. What is empty is unset.",
            "",
            *rows,
            "",
            "## Exit codes",
            "",
            "The command's own code, or 128 + n when signal n ended it, and:",
            "",
            *codes,
            "",
        ]
    )


def default_text(variable: Variable) -> str:
    """The default as a user would write it."""
    match variable.default:
        case None | "":
            return "unset"
        case bool(value):
            return "1" if value else "0"
        case float(value):
            return plain(value)
        case list(value):
            return compact(value) if value else "unset"
        case dict(value):
            return compact(value)
        case value:
            return str(value)
