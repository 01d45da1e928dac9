"""`make outage`: how much is logged while the gateway is down under load, on the real LMCache server."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from demo.gateway import GatewayProcess
from demo.stack import ROOT
from tests.e2e.test_storage import drive, server
from xkv_lmcache.lmcache_log import QUIET_S

OURS = "[xkv-lmcache]"
SUMMARY = " INFO lookups "
THEIRS = ("Store task ", "store tasks failed since")
MOST_OF_OURS = 100
SEQUENCES = 20
"""Of each run of the load, with four objects each."""


@dataclass
class Volume:
    """Lines that were logged during an outage."""

    seconds: float
    ours: int
    """All of ours, with the `summaries`."""
    summaries: int
    theirs: int
    """LMCache's about refused stores."""
    stores: int
    """Stores that were refused: one line each, with every key, without the filter."""

    @property
    def bounded(self) -> bool:
        """Whether it is little: below 100 lines of ours in ten minutes, LMCache's once, then one a minute."""
        allowed = MOST_OF_OURS * max(1.0, self.seconds / 600)
        return self.stores > 0 and self.ours < allowed and self.theirs <= 1 + self.seconds / QUIET_S


def outage(folder: Path, seconds: float) -> Volume:
    """Kills the gateway, keeps the server busy for so long, and counts."""
    with (
        GatewayProcess(folder / "store", fragment_bytes=131072) as gateway,
        server(gateway.params, folder / "server.log") as (service, port, http_port),
    ):
        drive(port, http_port)
        mark = service.log.mark()
        gateway.end(signal.SIGKILL)
        begun, first, stores = time.monotonic(), 1000, 0
        while time.monotonic() - begun < seconds:
            stores += drive(port, http_port, first=first, count=SEQUENCES).count("STORE: stored")
            first += SEQUENCES
        lines = service.log.since(mark).splitlines()
        ours = [line for line in lines if OURS in line]
        return Volume(
            time.monotonic() - begun,
            ours=len(ours),
            summaries=sum(SUMMARY in line for line in ours),
            theirs=sum(any(start in line for start in THEIRS) for line in lines),
            stores=stores,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.outage", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    arguments = parser.parse_args()
    folder = ROOT / ".run"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        found = outage(Path(own), arguments.minutes * 60)
    print(
        f"{found.seconds:.0f} s without a gateway, {found.stores} stores refused: {found.ours} lines of ours "
        f"({found.summaries} of them summaries), {found.theirs} of LMCache's about refused stores"
    )
    print("bounded" if found.bounded else "NOT BOUNDED")
    return 0 if found.bounded else 1


if __name__ == "__main__":
    sys.exit(main())
