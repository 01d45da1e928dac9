"""Builds the container images on this machine, without a registry and without a Docker daemon.

    python3 scripts/images.py [gateway] [cpu] [vllm]

Needs root, debootstrap, buildah and podman (`scripts/setup.py image-tools`) and takes what Docker would pull from here: a
Debian base made by debootstrap, and this machine's Rust toolchain mounted into the builder stage. `vllm` builds
docker/Dockerfile on the stage `serving` of Dockerfile.cpu, which has vLLM (CPU) and LMCache at the versions of its real base.
The images are `localhost/xkv-gateway`, `xkv-vllm-cpu` and `xkv-vllm`, with the version as tag. Registries of packages are
reached as this machine's own configuration says. Elsewhere `docker build -f docker/Dockerfile...` does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "localhost/xkv-base:bookworm"
BUILDER = "localhost/xkv-builder:bookworm"
SERVING = "localhost/xkv-serving:bookworm"
IMAGES = {
    "gateway": ("Dockerfile.gateway", "xkv-gateway"),
    "cpu": ("Dockerfile.cpu", "xkv-vllm-cpu"),
    "vllm": ("Dockerfile", "xkv-vllm"),
}
_RUST = "/opt/rust"
# What buildah keeps for `RUN --mount=type=cache,id=...`.
_CACHES = Path("/var/tmp/buildah-cache")


def say(text: str) -> None:
    print(f"[images] {text}", flush=True)


def call(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(f"[images] failed: `{' '.join(map(str, command))}`, exit code {done.returncode}, see above")
    return done.stdout.strip()


def version() -> str:
    """The version in pyproject.toml: the images' tag."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert isinstance(text, str)
    return text


def exists(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def make_bases() -> None:
    """The Debian base, and a builder that finds Rust where it is mounted."""
    if not exists(BASE):
        say("making the Debian base")
        with tempfile.TemporaryDirectory(prefix="xkv-base-") as folder:
            root = Path(folder, "root")
            log = Path(folder, "log")
            with log.open("w") as output:
                made = subprocess.run(
                    ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(root)],
                    check=False,
                    stdout=output,
                    stderr=output,
                )
            if made.returncode != 0:
                sys.exit(f"[images] failed: debootstrap\n{log.read_text()[-2000:]}")
            # As the `slim` base that stands in the Dockerfiles does.
            for name in ("doc", "man", "info", "locale", "lintian"):
                shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
            for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/log/*"):
                for path in root.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            subprocess.run(f"tar -C {root} -c . | podman import --quiet - {BASE}", shell=True, check=True)
    if not exists(BUILDER):
        container = call("buildah", "from", BASE)
        search = f"{_RUST}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        call(
            "buildah", "config", "--env", f"PATH={search}", "--env", "CARGO_HOME=/usr/local/cargo", container
        )
        call("buildah", "commit", "--quiet", "--rm", container, BUILDER)


def mounts(folder: Path) -> list[str]:
    """Options that give every step this machine's Rust, certificates and pip configuration."""
    rust = call("rustc", "--print", "sysroot")
    found = [f"--volume={rust}:{_RUST}:ro"]
    for bundle in (os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"):
        if bundle and Path(bundle).is_file():
            found.append(f"--volume={bundle}:/etc/ssl/certs/ca-certificates.crt:ro")
            break
    settings = call(sys.executable, "-m", "pip", "config", "list").splitlines()
    pairs = (line.replace(":env:.", "global.").partition("=") for line in settings if line)
    lines = ["[global]"]
    for key, _, value in pairs:
        text = value.strip("'\"")
        name = key.removeprefix("global.")
        if name in ("index-url", "extra-index-url", "timeout"):
            lines.append(f"{name} = {text}")
    lines.append("cert = /etc/ssl/certs/ca-certificates.crt")
    config = folder / "pip.conf"
    config.write_text("\n".join(lines) + "\n")
    found.append(f"--volume={config}:/etc/pip.conf:ro")
    config = folder / "uv.toml"
    config.write_text("system-certs = true\n")
    found.append(f"--volume={config}:/etc/uv/uv.toml:ro")
    return found


def seed_caches() -> None:
    """Gives the CPU image's build the wheels that the tests' environment was made from, as links where that works."""
    uv = ROOT / ".venv/bin/uv"
    target = _CACHES / "xkv-uv"
    if not uv.exists() or target.exists():
        return
    source = Path(call(uv, "cache", "dir"))
    _CACHES.mkdir(exist_ok=True)
    if source.is_dir() and source.stat().st_dev == _CACHES.stat().st_dev:
        call("cp", "-al", source, target)


def build(dockerfile: str, tag: str, base: str, options: Sequence[str], target: str = "") -> None:
    begun = time.monotonic()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.strip()
    call(
        *("buildah", "bud", "--isolation=chroot", "--format=docker", "--layers", *options),
        *(f"--build-arg=BUILDER={BUILDER}", f"--build-arg=BASE={base}", f"--build-arg=VERSION={version()}"),
        *([f"--target={target}"] if target else [f"--build-arg=REVISION={commit or 'unknown'}"]),
        *(f"--file={ROOT / 'docker' / dockerfile}", f"--tag={tag}", ROOT),
    )
    size = int(call("podman", "image", "inspect", tag, "--format", "{{.Size}}"))
    say(f"{tag}: {size / 1e6:.0f} MB, built in {time.monotonic() - begun:.0f} s")


def main(names: Sequence[str]) -> None:
    unknown = set(names) - IMAGES.keys()
    if unknown:
        sys.exit(f"[images] unknown image {', '.join(sorted(unknown))}; known: {', '.join(IMAGES)}")
    missing = [
        program for program in ("debootstrap", "buildah", "podman", "rustc") if not shutil.which(program)
    ]
    if missing or os.geteuid() != 0:
        sys.exit(
            f"[images] needs root{''.join(f', {each}' for each in missing)}; as root: python3 scripts/setup.py image-tools"
        )
    make_bases()
    with tempfile.TemporaryDirectory(prefix="xkv-images-") as folder:
        options = mounts(Path(folder))
        for name in names or ("gateway", "cpu"):
            dockerfile, image = IMAGES[name]
            base = BASE
            if name != "gateway":
                seed_caches()
            if name == "vllm":
                build("Dockerfile.cpu", SERVING, BASE, options, target="serving")
                base = SERVING
            build(dockerfile, f"localhost/{image}:{version()}", base, options)


if __name__ == "__main__":
    main(sys.argv[1:])
