"""Installs the wheel in a folder into an image's Python without changing anything that is there.

    python3 add_wheel.py FOLDER

Every installed distribution is a constraint at its installed version, so that pip adds what is missing and no more.
What was there is compared afterwards; a difference is an error (exit code 1), and so the image is not built.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path


def installed() -> dict[str, str]:
    """Normalised name and version of every distribution that this interpreter sees."""
    code = (
        "from importlib import metadata\n"
        "for each in metadata.distributions():\n"
        "    print(each.metadata['Name'], each.version)"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    pairs = (line.split(" ", 1) for line in text.splitlines() if not line.startswith("None "))
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pairs}


def installer() -> list[str]:
    """The command that installs into this interpreter: pip, or uv where there is none."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--break-system-packages"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--no-cache", "--break-system-packages", "--python", sys.executable]
    sys.exit("the base has neither pip nor uv; take one that has")


def main(folder: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{folder} has {len(wheels)} wheels, one is expected")
    before = installed()
    if "xkv-lmcache" in before:
        sys.exit(f"xkv-lmcache {before['xkv-lmcache']} is in the base already; take a base without it")
    if "lmcache" not in before:
        sys.exit("the base has no lmcache; take one that brings it, such as vllm/vllm-openai")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        # A local version (+cu130) is no release of the index, but it is what is there.
        constraints.writelines(f"{name}=={version}\n" for name, version in sorted(before.items()))
        constraints.flush()
        subprocess.run([*installer(), "--constraint", constraints.name, str(wheels[0])], check=True)
    after = installed()
    changed = {
        name: (version, after.get(name)) for name, version in before.items() if after.get(name) != version
    }
    if changed:
        sys.exit(f"the base was changed (before, after): {changed}")
    added = sorted(f"{name} {version}" for name, version in after.items() if name not in before)
    print(f"added {', '.join(added)}; {len(before)} distributions of the base are as they were")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
