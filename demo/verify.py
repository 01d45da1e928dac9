"""`make verify`: `xkv verify` on a real vLLM, with every hit from the second tier."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from demo.__main__ import RUN, STORE_GB, Progress
from demo.model import MODELS, SMOLLM2, make
from demo.stack import ONE_THREAD, Serving, ending_cleanly


def command(serving: Serving, count: int, *arguments: str) -> list[str]:
    """`xkv verify` on `serving`, which empties L1 between its passes."""
    return [
        *(sys.executable, "-m", "xkv_lmcache.cli", "verify", "--count", str(count)),
        *("--url", f"http://127.0.0.1:{serving.vllm_port}", "--clear-l1", serving.server_url("")),
        *arguments,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.verify", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default=SMOLLM2, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=50, help="prompts; default: %(default)s")
    arguments = parser.parse_args()
    say = Progress()
    folder = RUN / "verify"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with ending_cleanly():
            model = make(arguments.model, RUN / "models")
            say(f"starting the LMCache server and vLLM; log: {folder / 'serving.log'}")
            params = {"store": str(folder / "store"), "store_gb": STORE_GB, "namespace": arguments.model}
            with Serving(model, folder / "serving.log", params, ONE_THREAD) as serving:
                serving.wait_until_ready(say)
                say(f"xkv verify, {arguments.count} prompts")
                length = ("--words", "300", "--max-tokens", "16")
                done = subprocess.run(command(serving, arguments.count, *length), check=False)
                say(f"{serving.l2_objects_loaded()} objects were loaded from the second tier")
                return done.returncode
    finally:
        shutil.rmtree(folder / "store", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
