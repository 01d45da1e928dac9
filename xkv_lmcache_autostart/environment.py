"""The environment of the children, and what may be shown of it.

The server's `/env` prints its environment to anyone who reaches the front end, so it gets a whitelist. The
command gets everything the launcher has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from xkv_lmcache_autostart.settings import Settings

SERVER_PATTERNS: Final = (
    # The process itself
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PWD",
        "HOSTNAME",
        "LANG",
        "LANGUAGE",
        "LC_*",
        "TZ",
        "TERM",
    ),
    *(
        "TMPDIR",
        "XDG_*",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHON*",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "MALLOC_*",
    ),
    *("GLIBC_TUNABLES", "RUST_LOG", "RUST_BACKTRACE", "XKV_*"),
    # LMCache, accelerators, numeric libraries
    *(
        "LMCACHE_*",
        "CUDA*",
        "NVIDIA_*",
        "NCCL_*",
        "UCX_*",
        "HIP_*",
        "HSA_*",
        "ROCM_*",
        "ROCR_*",
        "ZE_*",
        "TORCH*",
    ),
    *("PYTORCH_*", "OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMBA_*"),
    # Network
    *(
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
    ),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "OTEL_*"),
)
"""Names and patterns of what the server may see; `LMC_PASS_ENV` adds to them."""

_TELEMETRY_OFF: Final = {"LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

_SECRET_NAME: Final = re.compile(
    r"(?i)(secret|passw|passphrase|credential|(^|[_.-])(token|auth|authorization|key|headers)$|[_.-]pwd$"
    r"|token(s)?$|api[_-]?key|access[_-]?key|private[_-]?key)"
)
_USER_INFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_MASK: Final = "***"


def server_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The server's environment: what the whitelist lets through, and the safe defaults.

    A name that looks like a secret is let through by `LMC_PASS_ENV` alone.
    """
    passed = {
        name: value
        for name, value in environ.items()
        if _matches(name, settings.pass_env) or (_matches(name, SERVER_PATTERNS) and not is_secret(name))
    }
    passed.setdefault("PYTHONUNBUFFERED", "1")
    return passed | _defaults(environ, settings)


def withheld_secrets(environ: Mapping[str, str], settings: Settings) -> list[str]:
    """The names that the whitelist would let through, but that look like secrets."""
    passed = server_environment(environ, settings)
    return sorted(name for name in environ if _matches(name, SERVER_PATTERNS) and name not in passed)


def command_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The main command's environment: the launcher's own, and the safe defaults."""
    return dict(environ) | _defaults(environ, settings)


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a JSON name is likely to hold a secret."""
    return _SECRET_NAME.search(name) is not None


def masked(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for people to see: secrets masked, also those in URLs and in JSON."""
    return {name: _MASK if is_secret(name) else _masked_value(value) for name, value in environ.items()}


def masked_argv(argv: Sequence[str]) -> list[str]:
    """`argv` for people to see: values of secret options and secret names in JSON arguments masked."""
    shown = []
    hide_next = False
    for word in argv:
        name, equals, value = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(_MASK)
            hide_next = False
            continue
        option = word.startswith("--")
        hide_next = option and not equals and is_secret(name[2:])
        if option and equals:
            shown.append(f"{name}={_MASK if is_secret(name[2:]) else _masked_value(value)}")
        else:
            shown.append(_masked_value(word))
    return shown


def masked_json(value: object) -> object:
    """A JSON value for people to see: what stands under a secret name is masked, at any depth."""
    if isinstance(value, dict):
        return {key: _MASK if is_secret(key) else masked_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_json(item) for item in value]
    return _without_user_info(value) if isinstance(value, str) else value


def _masked_value(text: str) -> str:
    if text.startswith(("{", "[")):
        try:
            return json.dumps(masked_json(json.loads(text)), separators=(",", ":"))
        except ValueError:
            pass
    return _without_user_info(text)


def _without_user_info(text: str) -> str:
    return _USER_INFO.sub(rf"\g<scheme>{_MASK}@", text)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _defaults(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """What every child gets: hashes that are the same in every process, and no reports to anybody."""
    hashing = {"PYTHONHASHSEED": environ.get("PYTHONHASHSEED") or "0"}
    return hashing if settings.telemetry else hashing | _TELEMETRY_OFF
