"""What must hold before the server is started: one finding for each thing examined."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from xkv_lmcache.grammar import GIB, KIB, MIB
from xkv_lmcache.params import DEFAULT_SHM_DIR, AdapterParams
from xkv_lmcache_autostart import machine, sockets
from xkv_lmcache_autostart.command import CPU_BLOCK_SIZE, PLUGIN_MODULE, plain
from xkv_lmcache_autostart.namespace import Fingerprint, ModelError
from xkv_lmcache_autostart.settings import Configuration, Settings, arguments

L2_EXTRA_SINCE: Final = (0, 5, 6)
"""The LMCache that does not store failed loads, which would spread to further adapters."""

_PREFETCH_POLICY: Final = "--l2-prefetch-policy"

SUPPORTED_LMCACHE: Final = ((0, 5, 4), (0, 5, 5), (0, 5, 6))
SUPPORTED_VLLM: Final = (0, 28)

_SHM_DIR: Final = "/dev/shm"
_SHM_BYTES: Final = 256 * MIB
"""What vLLM's processes need in shared memory for their messages (16 MiB each, ten of them), and some more."""

_MEMLOCK_BYTES: Final = MIB
"""Locked memory that io_uring's queues need on kernels before 5.12, which count it."""

_ANSWER_S: Final = 2.0
"""How long a gateway may take to answer."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One thing examined."""

    subject: str
    level: Level
    text: str
    """What was found; for a failure with the cure."""


def examine(configuration: Configuration, environ: Mapping[str, str]) -> Iterable[Finding]:
    """Examine the machine for the server of these settings. Nothing is changed."""
    settings, params = configuration.settings, configuration.params
    yield Finding("interpreter", Level.OK, f"Python {platform.python_version()}, {sys.executable}")
    yield _lmcache(settings)
    yield _vllm()
    plugin = _plugin()
    yield plugin
    yield _accelerator(settings, environ)
    yield _memory(settings, params)
    yield _shared_memory(settings)
    yield _memlock()
    yield _io_uring(params)
    yield _port("LMC_PORT", settings.host, settings.port)
    yield _port("LMC_HTTP_PORT", settings.http_host, settings.http_port)
    if params.stats_path is not None:
        yield _stats_path(params.stats_path)
    if params.mode == "gateway":
        yield from _gateway(params, reachable=plugin.level is Level.OK)
    elif plugin.level is Level.OK:
        yield _store(params)


def namespace(derive: Callable[[], Fingerprint]) -> Finding:
    """Whether the namespace can be derived from the model's files."""
    try:
        found = derive()
    except ModelError as error:
        return Finding("namespace", Level.FAILURE, str(error))
    return Finding(
        "namespace", Level.OK, f"{found.namespace}, of {found.files} weight files in {found.folder}"
    )


def _lmcache(settings: Settings) -> Finding:
    spec = find_spec("lmcache")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        text = "lmcache is not installed for this interpreter; run: pip install lmcache==0.5.4"
        return Finding("lmcache", Level.FAILURE, text)
    if not any(Path(folder, "v1/multiprocess/http_server.py").is_file() for folder in folders):
        text = (
            f"the lmcache in {folders[0]} has no multiprocess server; install lmcache 0.5.4, 0.5.5 or 0.5.6"
        )
        return Finding("lmcache", Level.FAILURE, text)
    if find_spec("torch") is None:
        return Finding("lmcache", Level.FAILURE, "lmcache needs torch; run: pip install torch")
    version = machine.lmcache_version()
    name = ".".join(map(str, version)) if version else "of unknown version"
    if settings.l2_extra and (version is None or version < L2_EXTRA_SINCE):
        text = (
            f"LMC_L2_EXTRA needs LMCache 0.5.6 or newer: this one ({name}) stores the unfilled buffers of "
            "failed loads to every adapter; leave LMC_L2_EXTRA out or install lmcache==0.5.6"
        )
        return Finding("lmcache", Level.FAILURE, text)
    policy = next((value for name, value in arguments(settings.extra_args) if name == _PREFETCH_POLICY), None)
    if policy == "retain" and (version is None or version < L2_EXTRA_SINCE):
        text = (
            f"LMC_EXTRA_ARGS has {_PREFETCH_POLICY} retain: before 0.5.6 LMCache ({name} here) can then keep the "
            "unfilled buffer of a failed load for good and answer it as a hit; leave it out or install "
            "lmcache==0.5.6"
        )
        return Finding("lmcache", Level.FAILURE, text)
    if version not in SUPPORTED_LMCACHE:
        text = f"lmcache {name} is none of those this was made for; install lmcache 0.5.4, 0.5.5 or 0.5.6"
        return Finding("lmcache", Level.WARNING, text)
    return Finding("lmcache", Level.OK, f"lmcache {name}")


def _vllm() -> Finding:
    version = machine.vllm_version()
    if version is None:
        return Finding("vllm", Level.OK, "vllm is not installed here, which the server does not need")
    name = ".".join(map(str, version))
    if version[:2] != SUPPORTED_VLLM:
        wanted = ".".join(map(str, SUPPORTED_VLLM))
        text = f"vllm {name} is not the {wanted} that this was made for; install vllm {wanted}.0"
        return Finding("vllm", Level.WARNING, text)
    return Finding("vllm", Level.OK, f"vllm {name}")


def _plugin() -> Finding:
    try:
        found = find_spec(f"{PLUGIN_MODULE}._native") is not None
        if found:
            _probe_store()
    except Exception as error:  # noqa: BLE001 (whatever keeps it from being imported)
        text = (
            f"{PLUGIN_MODULE} cannot be imported ({error}); install this package's wheel for this interpreter"
        )
        return Finding("plugin", Level.FAILURE, text)
    if not found:
        text = f"{PLUGIN_MODULE} has no native module here; install this package's wheel for this interpreter"
        return Finding("plugin", Level.FAILURE, text)
    return Finding("plugin", Level.OK, f"{PLUGIN_MODULE} with its native module")


def _accelerator(settings: Settings, environ: Mapping[str, str]) -> Finding:
    if machine.accelerator(environ):
        return Finding("accelerator", Level.OK, "an accelerator is visible")
    if settings.transfer_mode == "lmcache_driven":
        text = (
            "no accelerator is visible, and LMC_TRANSFER_MODE=lmcache_driven lets vLLM on a CPU wait for "
            "answers in vain; unset it or write auto"
        )
        return Finding("accelerator", Level.WARNING, text)
    if settings.chunk % CPU_BLOCK_SIZE:
        text = (
            f"no accelerator is visible, and LMC_CHUNK={settings.chunk} is no multiple of vLLM's block size "
            f"on a CPU, {CPU_BLOCK_SIZE}: vLLM will not start unless its --block-size divides it"
        )
        return Finding("accelerator", Level.WARNING, text)
    return Finding("accelerator", Level.OK, "no accelerator is visible; KV cache is copied by the CPU")


def _memory(settings: Settings, params: AdapterParams) -> Finding:
    memory = machine.memory()
    available = memory.available / GIB
    slots = params.slot_memory_bytes / GIB
    needed = f"L1 of {plain(settings.l1_gb)} GiB (LMC_L1_GB) and slots of {slots:.2f} GiB"
    if settings.l1_gb + slots > available:
        fitting = max(0.1, int((available * 0.8 - slots) * 10) / 10)
        text = f"{needed} exceed the {available:.1f} GiB at hand ({memory.limit}); set LMC_L1_GB={fitting:g}"
        return Finding("memory", Level.FAILURE, text)
    return Finding("memory", Level.OK, f"{needed} fit in {available:.1f} GiB ({memory.limit})")


def _shared_memory(settings: Settings) -> Finding:
    try:
        usage = shutil.disk_usage(_SHM_DIR)
    except OSError as error:
        text = (
            f"{_SHM_DIR} cannot be used ({error.strerror}): vLLM's processes talk through it; mount it "
            "(--ipc host, or --shm-size)"
        )
        return Finding(_SHM_DIR, Level.WARNING, text)
    free = f"{usage.free / MIB:.0f} of {usage.total / MIB:.0f} MiB are free"
    pool = next((value for name, value in arguments(settings.extra_args) if name == "--shm-name"), None)
    if pool and usage.free < settings.l1_gb * GIB:
        text = (
            f"{free} in {_SHM_DIR}, too little for L1 in shared memory ({plain(settings.l1_gb)} GiB, --shm-name), "
            "so that LMCache copies KV cache through its socket; make room or lower LMC_L1_GB"
        )
        return Finding(_SHM_DIR, Level.WARNING, text)
    if usage.free < _SHM_BYTES:
        text = (
            f"{free} in {_SHM_DIR}: vLLM's processes, which talk through it, may not start; clear it or make it "
            "larger (--ipc host, or --shm-size)"
        )
        return Finding(_SHM_DIR, Level.WARNING, text)
    return Finding(_SHM_DIR, Level.OK, free)


def _memlock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", Level.OK, "locked memory is not limited")
    text = f"locked memory is limited to {limit // KIB} KiB"
    if limit < _MEMLOCK_BYTES:
        text += ", in which io_uring does not fit on kernels before 5.12; raise it (ulimit -l, --ulimit memlock=-1)"
        return Finding("memlock", Level.WARNING, text)
    return Finding("memlock", Level.OK, f"{text}, which is enough")


def _io_uring(params: AdapterParams) -> Finding:
    if params.mode == "gateway" or params.io_engine == "pool":
        return Finding("io_uring", Level.OK, "not used with these settings")
    refusal = machine.io_uring_refusal()
    if refusal is None:
        return Finding("io_uring", Level.OK, "the kernel provides it")
    if params.io_engine == "uring":
        text = f"io_engine='uring' cannot be had: {refusal}; allow it, or write auto"
        return Finding("io_uring", Level.FAILURE, text)
    text = f"{refusal}: drives are used by threads, which is slower; allow it for full speed"
    return Finding("io_uring", Level.WARNING, text)


def _port(name: str, host: str, port: int) -> Finding:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the server does it, so that connections of an earlier server that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except socket.gaierror as error:
        text = f"{host!r} does not resolve ({error.strerror}); write an address of this machine"
        return Finding(name, Level.FAILURE, text)
    except OSError as error:
        return Finding(name, Level.FAILURE, f"{name}={port} {_port_trouble(error, host, port)}")
    return Finding(name, Level.OK, f"port {port} on {host} is free")


def _port_trouble(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        try:
            holders = {sockets.holder(listener) for listener in sockets.listeners(host, port)}
        except OSError:
            holders = set()
        return (
            f"is taken by {' and '.join(sorted(holders)) or 'another process'}; end it or choose another port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot be opened: {host} is no address of this machine; write one that is"
    if error.errno == errno.EACCES:
        return "cannot be opened without privileges; choose a port of 1024 or above"
    return f"cannot be opened on {host}: {error.strerror}"


def _stats_path(path: str) -> Finding:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        text = f"stats_path={path!r}: the folder {folder} does not exist; make it or choose another"
        return Finding("stats_path", Level.FAILURE, text)
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"stats_path={path!r}: the folder {folder} is not writable; allow it or choose another"
        return Finding("stats_path", Level.FAILURE, text)
    return Finding("stats_path", Level.OK, f"statistics go to {path}")


def _store(params: AdapterParams) -> Finding:
    paths = params.store_paths
    try:
        _probe_store()(paths, params.store_gb, params.wanted_fragment_bytes)
    except (ValueError, OSError) as error:
        return Finding("store", Level.FAILURE, str(error))
    return Finding("store", Level.OK, f"{', '.join(paths)} can be used")


def _gateway(params: AdapterParams, *, reachable: bool) -> Iterable[Finding]:
    """The token, the shared folder and, where the native module is there to ask it, the gateway."""
    token = None
    if params.token_file is not None:
        finding, token = _token(params.token_file)
        yield finding
        reachable = reachable and finding.level is not Level.FAILURE
    yield _shared_folder(params.shm_dir or DEFAULT_SHM_DIR)
    if reachable:
        yield _answer(params, token)


def _token(path: str) -> tuple[Finding, str | None]:
    try:
        token = Path(path).read_text().rstrip("\r\n")
        mode = os.stat(path).st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        text = f"token_file={path!r} cannot be read ({reason}); name a readable file with the gateway's token"
        return Finding("token", Level.FAILURE, text), None
    if not token:
        text = f"token_file={path!r} is empty; write the gateway's token into it"
        return Finding("token", Level.FAILURE, text), None
    if mode & stat.S_IROTH:
        text = f"token_file={path!r} can be read by every user; run: chmod o-r {path}"
        return Finding("token", Level.WARNING, text), token
    return Finding("token", Level.OK, f"the token is in {path}"), token


def _shared_folder(path: str) -> Finding:
    if not os.path.isdir(path):
        text = (
            f"shm_dir={path!r} is no folder here; name the one that is shared with the gateway, and mount it"
        )
        return Finding("shm_dir", Level.FAILURE, text)
    if not os.access(path, os.R_OK | os.X_OK):
        text = f"shm_dir={path!r} may not be entered; allow it to this user"
        return Finding("shm_dir", Level.FAILURE, text)
    return Finding("shm_dir", Level.OK, f"{path} is there")


def _answer(params: AdapterParams, token: str | None) -> Finding:
    from xkv_lmcache._native import gateway_status

    host, port = params.gateway_host or "", params.gateway_port
    try:
        state = json.loads(gateway_status(host, port, token, min(_ANSWER_S, params.wait_timeout_s)))
    except PermissionError as error:
        return Finding("gateway", Level.FAILURE, str(error))
    except (OSError, ValueError) as error:
        text = f"{error}; until it is there, everything is a miss"
        return Finding("gateway", Level.WARNING, text)
    has, wanted = state["fragment_bytes"], params.wanted_fragment_bytes
    if wanted is not None and wanted != has:
        text = (
            f"fragment_bytes={wanted} is not the {has} of the store behind gateway {host}:{port}; leave it out, "
            "or write auto"
        )
        return Finding("gateway", Level.FAILURE, text)
    return Finding("gateway", Level.OK, f"gateway {host}:{port} answers: {state['description']}")


def _probe_store() -> Callable[[list[str], float | None, int | None], None]:
    """The native module's examination of a store: raises ValueError or OSError with path, value and cure."""
    from xkv_lmcache._native import probe_store

    return probe_store
