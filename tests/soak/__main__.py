"""`make soak`: the soak through both backends, one after the other, with what was counted."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from demo.stack import ROOT
from tests.soak.soak import MIB, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="in all; default: %(default)s")
    parser.add_argument("--backends", default="embedded,gateway", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where the stores go; default: .run")
    parser.add_argument("--mib-per-s", type=float, default=0, help="hold it back to so much; default: no")
    parser.add_argument(
        "--kill-every-s", type=float, default=0, help="kill the gateway so often; default: never"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or ROOT / ".run"
    folder.mkdir(exist_ok=True)
    kinds = arguments.backends.split(",")
    wrong = 0
    for kind in kinds:
        seconds = arguments.minutes * 60 / len(kinds)
        print(f"{kind}: {seconds:.0f} s ...", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            outcome = soak(
                kind,
                Path(own),
                seconds,
                mib_per_s=arguments.mib_per_s,
                kill_every_s=arguments.kill_every_s,
            )
        for name, count in sorted(outcome.counts.items()):
            shown = f"{count / MIB / 1024:.1f} GiB" if name == "bytes checked" else str(count)
            print(f"  {name:24} {shown:>12}")
        print(f"  {'longest answer':24} {outcome.longest_s:>10.2f} s")
        for name, text in outcome.footprints.items():
            print(f"  {name} at the end: {text}")
        for fault in outcome.faults:
            print(f"  FAILED {fault}")
        wrong += len(outcome.faults)
    print("no wrong byte, nothing grew" if not wrong else f"{wrong} faults", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
