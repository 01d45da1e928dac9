"""`python3 -m xkv_lmcache_autostart`.

A command that wants no server is executed before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from xkv_lmcache import grammar
from xkv_lmcache_autostart.execution import execute


def main() -> None:
    """The launcher's entry point."""
    argv = sys.argv[1:]
    if argv[:1] == ["--"] and len(argv) > 1 and _is_off("LMC_ENABLE") and _is_off("LMC_WAIT_FOR_SERVER"):
        execute(argv[1:], os.environ)
    # As PID 1 the default is to ignore these; nothing is running yet that would have to be ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)
    from xkv_lmcache_autostart import cli

    cli.run()


def _is_off(name: str) -> bool:
    """Whether a switch is off; one that does not parse is for the whole launcher to complain about."""
    text = os.environ.get(name, "").strip()
    try:
        return not text or not grammar.boolean(text)
    except ValueError:
        return False


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
