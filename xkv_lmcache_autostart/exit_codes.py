"""The launcher's exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the launcher's own exit codes mean.

    Where the main command ran, its code is passed on: as it is, or 128 + n when signal n ended it.
    """

    OK = 0
    """Nothing failed."""

    START_FAILED = 1
    """The machine cannot run the server as configured, or the server did not become ready."""

    BAD_SETTINGS = 2
    """A setting or an option is wrong; nothing was started."""

    SERVER_LOST = 3
    """The server died under the command and `LMC_ON_SERVER_EXIT=exit` says to end with it."""

    CHECK_WARNED = 4
    """`--check` found something worth a warning and no failure."""

    NOT_EXECUTABLE = 126
    """The command exists, but cannot be executed."""

    NOT_FOUND = 127
    """The command does not exist."""


def of_signal(number: int) -> int:
    """The exit code of a process that signal `number` ended, as a shell reports it."""
    return 128 + number


def of_wait_status(code: int) -> int:
    """The exit code for `os.waitstatus_to_exitcode`'s result, which is negative for a signal."""
    return code if code >= 0 else of_signal(-code)
