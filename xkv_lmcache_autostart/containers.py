"""`xkv_lmcache_autostart container run|stop|logs|status`: the server in a container of its own.

Through the Docker SDK, so that it works against Docker's API and podman's. What the container gets follows from the
settings: host network and IPC (L1 goes to vLLM through shared memory and CUDA IPC), GPUs where there are any, and the
drives and folders that the settings name, under the same paths as outside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import click

from xkv_lmcache.params import DEFAULT_SHM_DIR
from xkv_lmcache_autostart import environment, log, machine
from xkv_lmcache_autostart.cli import complain, configure, setting_options, with_namespace
from xkv_lmcache_autostart.command import compact
from xkv_lmcache_autostart.exit_codes import ExitCode
from xkv_lmcache_autostart.output import TAIL_LINES
from xkv_lmcache_autostart.readiness import ChildProbe, NotReady, wait_for
from xkv_lmcache_autostart.settings import Configuration, Settings, texts

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

NAME: Final = "lmcache-server"
LABEL: Final = "xkv-lmcache.settings"
"""The label with the digest of what a container was made from: ours have it."""

STOP_LABEL: Final = "xkv-lmcache.stop-s"
"""The label with the grace between the signal to stop and KILL, in seconds."""

_PASSED: Final = ("LMCACHE_*", "OTEL_*", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables beyond the settings that the container gets; `LMC_PASS_ENV` adds to them."""

_NOT_PASSED: Final = frozenset({"LMC_ENABLE", "LMC_WAIT_FOR_SERVER", "LMC_MODEL"})
_SOCKETS: Final = ("/var/run/docker.sock", "/run/podman/podman.sock", "{XDG_RUNTIME_DIR}/podman/podman.sock")


@dataclass(frozen=True)
class Wishes:
    """What the command line says of the container beyond the settings."""

    image: str
    name: str
    gpus: str
    restart: str
    entrypoint: str
    volumes: tuple[str, ...]
    ulimits: tuple[str, ...]
    security: tuple[str, ...]


def specification(
    configuration: Configuration,
    wishes: Wishes,
    variables: Mapping[str, str],
    *,
    accelerator: bool,
) -> dict[str, Any]:
    """What to make the container from, as the keyword arguments of the Docker SDK, in plain JSON.

    `variables` is the environment of the container. Missing folders of the store are made.
    """
    with_gpus = wishes.gpus == "all" or (wishes.gpus == "auto" and accelerator)
    folders, devices = _mounts(configuration)
    return {
        "image": wishes.image,
        "name": wishes.name,
        "entrypoint": [wishes.entrypoint],
        "command": ["-m", "xkv_lmcache_autostart", "--exec"],
        "environment": dict(sorted(variables.items())),
        "network_mode": "host",
        "ipc_mode": "host",
        "gpus": with_gpus,
        "devices": [f"{path}:{path}:rwm" for path in devices],
        "volumes": [f"{path}:{path}:{mode}" for path, mode in sorted(folders.items())] + list(wishes.volumes),
        "ulimits": list(wishes.ulimits),
        "security_opt": list(wishes.security),
        "restart": wishes.restart,
        "labels": {STOP_LABEL: str(ceil(configuration.settings.stop_s))},
    }


def container_environment(
    environ: Mapping[str, str], options: Mapping[str, str], settings: Settings
) -> dict[str, str]:
    """The container's environment: the settings that are set, and a few names besides."""
    patterns = (*_PASSED, *settings.pass_env)
    passed = {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        and (not environment.is_secret(name) or any(fnmatchcase(name, own) for own in settings.pass_env))
    }
    values, _ = texts(environ, options)
    passed |= {f"LMC_{field.upper()}": text for field, text in values.items()}
    # `auto` was derived here, where the model is, and may have been in the parameters.
    passed.pop("LMC_XKV_PARAMS", None)
    if settings.xkv_params:
        passed["LMC_XKV_PARAMS"] = compact(settings.xkv_params)
    if settings.xkv_namespace is not None:
        passed["LMC_XKV_NAMESPACE"] = settings.xkv_namespace
    return {name: value for name, value in passed.items() if name not in _NOT_PASSED}


def _mounts(configuration: Configuration) -> tuple[dict[str, str], list[str]]:
    """The folders and files to mount with their mode, and the block devices."""
    params = configuration.params
    mounts: dict[str, str] = {}
    devices = []
    for path in params.store_paths:
        if _is_block_device(path):
            devices.append(path)
            continue
        try:
            if not os.path.exists(path):
                os.makedirs(path)
        except OSError as error:
            _fail(
                f"the folder {path} cannot be made ({error.strerror}); make it, or choose another LMC_XKV_STORE"
            )
        mounts[os.path.abspath(path)] = "rw"
    if params.stats_path is not None:
        mounts[os.path.dirname(os.path.abspath(params.stats_path))] = "rw"
    if params.shm_dir is not None and params.shm_dir != DEFAULT_SHM_DIR:
        mounts[os.path.abspath(params.shm_dir)] = "rw"
    if params.token_file is not None:
        mounts[os.path.abspath(params.token_file)] = "ro"
    return mounts, devices


def _is_block_device(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False


@click.group(name="container", help="The LMCache server in a container of its own, through Docker or podman.")
def container() -> None:
    pass


_name = click.option("--name", default=NAME, show_default=True, help="The container's name.")


@container.command(
    help="Start the server's container with the settings in force; what runs already is left alone."
)
@click.option("--image", required=True, help="The image, with this package, LMCache and Python in it.")
@_name
@click.option(
    "--gpus",
    type=click.Choice(["auto", "all", "none"]),
    default="auto",
    show_default=True,
    help="GPUs of the container; auto: all where this machine shows any.",
)
@click.option(
    "--restart",
    type=click.Choice(["no", "on-failure", "unless-stopped", "always"]),
    default="unless-stopped",
    show_default=True,
    help="What the engine does when the server ends.",
)
@click.option("--entrypoint", default="python3", show_default=True, help="The interpreter in the image.")
@click.option("--volume", "volumes", multiple=True, metavar="SOURCE:TARGET[:MODE]", help="A further mount.")
@click.option(
    "--ulimit",
    "ulimits",
    multiple=True,
    metavar="NAME=SOFT[:HARD]",
    help="A resource limit of the container.",
)
@click.option(
    "--security-opt",
    "security",
    multiple=True,
    metavar="TEXT",
    help="A security option, such as a seccomp profile that allows io_uring.",
)
@click.option("--replace", is_flag=True, help="End a container of this name that has other settings.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the server is ready.")
@setting_options
def run(
    image: str,
    name: str,
    gpus: str,
    restart: str,
    entrypoint: str,
    volumes: tuple[str, ...],
    ulimits: tuple[str, ...],
    security: tuple[str, ...],
    replace: bool,
    wait: bool,
    **options: str | None,
) -> None:
    configuration, _ = configure(options, ())
    log.set_up(configuration.settings.log_format, configuration.settings.log_level)
    for warning in (*configuration.warnings, *configuration.server_warnings):
        log.get().warning(warning)
    configuration = with_namespace(configuration, ())
    settings = configuration.settings
    given = {field: text for field, text in options.items() if text is not None}
    wishes = Wishes(image, name, gpus, restart, entrypoint, volumes, ulimits, security)
    wanted = specification(
        configuration,
        wishes,
        container_environment(os.environ, given, settings),
        accelerator=machine.accelerator(os.environ),
    )
    with _Engine() as engine:
        engine.start(wanted, replace=replace)
        if wait:
            engine.wait_until_ready(name, settings)


@container.command(help="Stop the server's container. One that is not there is no error.")
@_name
@click.option("--remove", is_flag=True, help="Remove it as well.")
def stop(name: str, remove: bool) -> None:
    with _Engine() as engine:
        found = engine.find(name)
        if found is None:
            click.echo(f"there is no container {name}")
            return
        if found.status == "running":
            _stop(found)
            click.echo(f"{name} is stopped")
        else:
            click.echo(f"{name} does not run")
        if remove:
            found.remove()
            click.echo(f"{name} is removed")


@container.command(help="Print the server's log.")
@_name
@click.option("--follow", "-f", is_flag=True, help="Go on until the server ends.")
@click.option("--tail", type=click.IntRange(min=0), default=None, help="The last lines only.")
def logs(name: str, follow: bool, tail: int | None) -> None:
    with _Engine() as engine:
        found = engine.existing(name)
        for chunk in found.logs(stream=True, follow=follow, tail="all" if tail is None else tail):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()


@container.command(help="Say how the server's container is. Exit code 0: it is ready; 1: it is not.")
@_name
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str, as_json: bool) -> None:
    with _Engine() as engine:
        found = engine.find(name)
        if found is None:
            report: dict[str, object] = {"name": name, "state": "absent", "ready": False}
        else:
            variables = _variables(found)
            configuration, _ = configure({}, (), variables)
            report = {
                "name": name,
                "state": found.status,
                "ready": engine.looks_ready(found, configuration.settings),
                "image": found.attrs["Config"]["Image"],
                "started": found.attrs["State"]["StartedAt"],
                "restarts": found.attrs.get("RestartCount", 0),
                "settings": _shown(variables, configuration.settings),
            }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        state = "ready" if report["ready"] else "not ready"
        click.echo(f"{name}: {report['state']}, {state}")
        for key in ("image", "started", "restarts"):
            if key in report:
                click.echo(f"  {key}: {report[key]}")
        settings = report.get("settings", {})
        assert isinstance(settings, dict)
        for key, value in sorted(settings.items()):
            click.echo(f"  {key}={shlex.quote(value)}")
    sys.exit(ExitCode.OK if report["ready"] else ExitCode.START_FAILED)


class _Engine:
    """A container engine, and what is done with it. Its errors end the program with a line each."""

    def __enter__(self) -> Self:
        try:
            import docker
            import docker.errors

            self._docker = docker
            client = docker.DockerClient
        except (ImportError, AttributeError):
            # A folder of that name next to us can be imported, too, and has none of it.
            _fail("the Docker SDK for Python is missing; run: pip install 'xkv-lmcache[docker]'")
        try:
            self._client: DockerClient = (
                docker.from_env() if os.environ.get("DOCKER_HOST") else client(base_url=_socket())
            )
            self._client.ping()
        except Exception as error:  # noqa: BLE001 (the SDK lets through what requests and urllib3 raise)
            where = os.environ.get("DOCKER_HOST") or _socket()
            _fail(
                f"no container engine answers at {where} ({error}); start Docker or podman's API "
                "(systemctl start podman.socket), or set DOCKER_HOST"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._client.close()
        if isinstance(error, self._docker.errors.DockerException | OSError):
            _fail(f"the container engine refuses: {getattr(error, 'explanation', None) or error}")

    def find(self, name: str) -> Container | None:
        try:
            return self._client.containers.get(name)
        except self._docker.errors.NotFound:
            return None

    def existing(self, name: str) -> Container:
        found = self.find(name)
        if found is None:
            _fail(f"there is no container {name}; start it with `container run`, or say --name")
        return found

    def start(self, wanted: Mapping[str, Any], *, replace: bool) -> None:
        """Have a container that is made from `wanted` running."""
        name, image = wanted["name"], wanted["image"]
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
        found = self.find(name)
        if found is not None:
            has = found.labels.get(LABEL)
            if has is None:
                _fail(f"the container {name} is none of ours; choose another --name, or remove it yourself")
            if has == digest:
                if found.status == "running":
                    click.echo(f"{name} runs already, with these settings")
                    return
                found.start()
                click.echo(f"{name} is started again")
                return
            if not replace:
                _fail(
                    f"the container {name} has other settings ({_differences(found, wanted)}); --replace ends it "
                    "and starts one with these, whose L1 is empty"
                )
            _stop(found)
            found.remove()
            click.echo(f"the {name} with other settings is removed")
        arguments = self._arguments(wanted)
        arguments["labels"] = {**wanted["labels"], LABEL: digest}
        try:
            made = self._client.containers.create(**arguments)
        except self._docker.errors.ImageNotFound:
            click.echo(f"pulling {image}")
            self._client.images.pull(image)
            made = self._client.containers.create(**arguments)
        try:
            made.start()
        except self._docker.errors.APIError:
            made.remove(force=True)
            raise
        click.echo(f"{name} is started")

    def _arguments(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """`wanted` as keyword arguments of the SDK."""
        types = self._docker.types
        arguments = {key: value for key, value in wanted.items() if key not in ("gpus", "ulimits", "restart")}
        arguments["restart_policy"] = {"Name": wanted["restart"]}
        arguments["ulimits"] = [types.Ulimit(**_ulimit(text)) for text in wanted["ulimits"]]
        if wanted["gpus"]:
            arguments["device_requests"] = [types.DeviceRequest(count=-1, capabilities=[["gpu"]])]
        return arguments

    def wait_until_ready(self, name: str, settings: Settings) -> None:
        """Return when the server is ready; when it ends instead, stop the container and fail with its last lines."""
        found = self.existing(name)
        restarts = found.attrs.get("RestartCount", 0)
        probe = _probe(found, settings)
        begun = time.monotonic()

        def look() -> bool:
            found.reload()
            if found.status != "running" or found.attrs.get("RestartCount", 0) != restarts:
                raise NotReady("it ended before it was ready")
            return probe.look()

        try:
            if wait_for(look, settings.wait_s):
                click.echo(f"{name} is ready after {time.monotonic() - begun:.0f} s")
                return
            reason = f"it was not ready within LMC_WAIT_S={settings.wait_s:g} seconds"
        except NotReady as error:
            reason = str(error)
        _stop(found)
        lines = found.logs(tail=TAIL_LINES).decode(errors="replace").rstrip()
        _fail(f"{name} did not start: {reason}; it is stopped, its last lines:\n{lines}")

    def looks_ready(self, found: Container, settings: Settings) -> bool:
        if found.status != "running":
            return False
        try:
            return _probe(found, settings).look()
        except NotReady:
            return False


def _stop(found: Container) -> None:
    """TERM, the grace of its settings, KILL."""
    found.stop(timeout=int(found.labels.get(STOP_LABEL, 10)))


def _probe(found: Container, settings: Settings) -> ChildProbe:
    """Looks at the container's first process, which becomes the server, in the machine's own network."""
    return ChildProbe(found.attrs["State"]["Pid"], settings)


def _socket() -> str:
    """The socket of an engine on this machine, Docker's before podman's."""
    places = [place.format(XDG_RUNTIME_DIR=os.environ.get("XDG_RUNTIME_DIR", "")) for place in _SOCKETS]
    return f"unix://{next((place for place in places if Path(place).is_socket()), places[0])}"


def _ulimit(text: str) -> dict[str, Any]:
    name, _, limits = text.partition("=")
    soft, _, hard = limits.partition(":")
    try:
        return {"name": name, "soft": int(soft), "hard": int(hard or soft)}
    except ValueError:
        raise click.BadParameter(
            f"--ulimit={text!r} is no limit; write NAME=SOFT or NAME=SOFT:HARD"
        ) from None


def _variables(found: Container) -> dict[str, str]:
    pairs: Iterable[str] = found.attrs["Config"]["Env"] or ()
    return dict(pair.partition("=")[::2] for pair in pairs)


def _shown(variables: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The settings among a container's variables, for people to see."""
    shown = environment.masked({key: value for key, value in variables.items() if key.startswith("LMC_")})
    if "LMC_EXTRA_ARGS" in shown:
        shown["LMC_EXTRA_ARGS"] = shlex.join(environment.masked_argv(settings.extra_args))
    return shown


def _differences(found: Container, wanted: Mapping[str, Any]) -> str:
    """What differs, by name: values may be secret."""
    variables = {key: value for key, value in _variables(found).items() if key.startswith("LMC_")}
    new = {key: value for key, value in wanted["environment"].items() if key.startswith("LMC_")}
    names = sorted(key for key in variables.keys() | new.keys() if variables.get(key) != new.get(key))
    if found.attrs["Config"]["Image"] != wanted["image"]:
        names.insert(0, "image")
    return ", ".join(names) or "flags of the container"


def _fail(text: str) -> NoReturn:
    complain(text)
    sys.exit(ExitCode.START_FAILED)
