"""Becoming another program. Only the standard library is needed, so that a plain command costs nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


def execute(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `argv`, with the signals as a program expects to find them.

    Exits with 127 where the program does not exist and 126 where it cannot be executed.
    """
    # Python ignores these, and what is ignored stays ignored through exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(environ))
    except FileNotFoundError:
        reason, code = "does not exist", 127
    except OSError as error:
        reason, code = f"cannot be executed ({error.strerror})", 126
    print(f"xkv_lmcache_autostart: {argv[0]} {reason}; write a command after --", file=sys.stderr)
    sys.exit(code)
