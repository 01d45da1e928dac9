"""The exit codes of `xkv`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What its exit codes mean; 128 + n on signal n."""

    OK = 0
    """Nothing failed; for `check`: no damage, or all of it repaired; for `verify`: no answer changed, hits were seen."""

    FAILED = 1
    """The machine, the store or the gateway refuses; for `check` also: damage was found; for `verify` also: an answer
    changed because of the cache, or nothing is proven."""

    USAGE = 2
    """A setting, option or argument is wrong; nothing was started or changed."""
