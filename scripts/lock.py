"""Resolves `requirements/*.in` to pinned `requirements/*.txt`.

    .venv/bin/python scripts/lock.py [--upgrade]

Keeps the pins that are there unless `--upgrade` is given. Needs the `uv` of `.venv` (`scripts/setup.py`).
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".venv" / "bin" / "uv"
OVERRIDDEN = ("main", "lmcache-0.5.5", "lmcache-0.5.6")


def resolve(name: str, *sources: str) -> None:
    target = f"requirements/{name}.txt"
    command = [
        str(UV),
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
        "--no-annotate",
    ]
    command += ["--custom-compile-command", "scripts/lock.py", *sys.argv[1:], *sources, "-o", target]
    print(target, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


for name in OVERRIDDEN:
    resolve(name, "pyproject.toml", f"requirements/{name}.in", "--override", "requirements/overrides.txt")
resolve("torch-cuda", "requirements/torch-cuda.in")
# What the images get, at the versions that are tested.
resolve("gateway", "pyproject.toml", "-c", "requirements/main.txt")
resolve(
    "cpu-image",
    *("pyproject.toml", "requirements/cpu-image.in", "-c", "requirements/main.txt"),
    *("--override", "requirements/overrides.txt"),
)
