"""Settings to commands: the server's arguments, the L2 adapter, vLLM's transfer config. Pure functions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from xkv_lmcache.problems import SettingProblem
from xkv_lmcache_autostart.settings import Settings, arguments

SERVER_MODULE: Final = "lmcache.v1.multiprocess.http_server"
"""What `lmcache server` runs; run directly, since 0.5.4's command line does not import without `openai`."""

PLUGIN_MODULE: Final = "xkv_lmcache"
PLUGIN_CLASS: Final = "XkvL2Connector"

REGISTRATION_GRACE_S: Final = 7 * 24 * 3600
"""How long the server keeps waiting for an idle vLLM to register again."""

HEARTBEAT_S: Final = 2
"""Seconds between two looks of vLLM's workers whether the server lives.

A restart must not fit between two looks (every 10 s by default): workers that miss it do not register
with the new server, so that nothing is found and every store blocks vLLM for `mq_timeout`.
"""

CPU_BLOCK_SIZE: Final = 128
"""vLLM's block size on a CPU, in tokens, where the command does not set another."""

_VLLM_MODULES: Final = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"})
_TRANSFER_CONFIG: Final = "--kv-transfer-config"


def server_argv(settings: Settings, python: str, *, accelerator: bool) -> list[str]:
    """The LMCache server's argument vector, to be run by the interpreter `python`.

    Without an accelerator the transfer mode is `auto`, since the server's default needs one.
    """
    mode = settings.transfer_mode or (None if accelerator else "auto")
    argv = [python, "-m", SERVER_MODULE]
    argv += ["--host", settings.host, "--port", str(settings.port)]
    argv += ["--http-host", settings.http_host, "--http-port", str(settings.http_port)]
    argv += ["--l1-size-gb", plain(settings.l1_gb), "--eviction-policy", settings.eviction]
    argv += ["--chunk-size", str(settings.chunk), "--hash-algorithm", "blake3"]
    argv += ["--worker-registration-grace-seconds", str(REGISTRATION_GRACE_S)]
    if mode is not None:
        argv += ["--supported-transfer-mode", mode]
    for adapter in [l2_adapter(settings), *settings.l2_extra]:
        argv += ["--l2-adapter", compact(adapter)]
    return argv + settings.extra_args


def l2_adapter(settings: Settings) -> dict[str, object]:
    """The configuration of our L2 adapter; parameters that are not set are left to the plugin's defaults."""
    return {
        "type": "native_plugin",
        "module_path": PLUGIN_MODULE,
        "class_name": PLUGIN_CLASS,
        "adapter_params": settings.adapter_params(),
    }


def kv_transfer_config(settings: Settings) -> dict[str, object]:
    """vLLM's `--kv-transfer-config` for the server of these settings.

    `recompute` and the short `mq_timeout` are deliberate: without them a failed load can end vLLM, and a dead
    server blocks its scheduler for 300 s.
    """
    timeout = settings.mq_timeout_s
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{settings.connect_host}",
            "lmcache.mp.port": settings.port,
            "lmcache.mp.mq_timeout": int(timeout) if timeout == int(timeout) else timeout,
            "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
        },
    }


@dataclass(frozen=True)
class VllmCommand:
    """What the launcher has to know of a command that serves vLLM."""

    block_size: int | None
    """`--block-size` in tokens, if the command has it."""
    lora: bool
    """Whether the command has `--enable-lora`."""
    transfer_config: bool
    """Whether the command brings a KV transfer config of its own."""

    @classmethod
    def parse(cls, argv: Sequence[str], read: Callable[[str], str] | None = None) -> VllmCommand | None:
        """Recognise `vllm serve` and `python -m vllm.entrypoints.openai.api_server`; None for anything else.

        `read` returns the text of a file that `--config` names; a transfer config in there counts.
        """
        words = vllm_words(argv)
        if words is None:
            return None
        # vLLM takes underscores for dashes, and a dotted name for one key of a JSON argument.
        options = [(name.replace("_", "-").partition(".")[0], value) for name, value in arguments(words)]
        sizes = [value for name, value in options if name == "--block-size" and value]
        files = [value for name, value in options if name == "--config" and value]
        own = any(len(name) > len("--kv-t") and _TRANSFER_CONFIG.startswith(name) for name, _ in options)
        if read is not None:
            own = own or any(re.search(r"kv[-_]transfer[-_]config", read(file)) for file in files)
        return cls(
            block_size=int(sizes[-1]) if sizes and sizes[-1].isdecimal() else None,
            lora=any(name == "--enable-lora" for name, _ in options),
            transfer_config=own,
        )


def with_transfer_config(argv: Sequence[str], settings: Settings, vllm: VllmCommand | None) -> list[str]:
    """The command with `--kv-transfer-config` added where it serves vLLM, has none and may get one."""
    if vllm is None or vllm.transfer_config or not settings.inject:
        return list(argv)
    return [*argv, _TRANSFER_CONFIG, compact(kv_transfer_config(settings))]


def vllm_problems(settings: Settings, vllm: VllmCommand | None, *, accelerator: bool) -> list[SettingProblem]:
    """What keeps this vLLM command from working with this server."""
    if vllm is None:
        return []
    problems = []
    block_size = vllm.block_size or (None if accelerator else CPU_BLOCK_SIZE)
    if block_size and settings.chunk % block_size:
        whose = "the command's --block-size" if vllm.block_size else "vLLM's block size on a CPU"
        near = max(block_size, round(settings.chunk / block_size) * block_size)
        message = f"is no multiple of {whose}, {block_size}; set it to {near}"
        if not vllm.block_size:
            message += " or give the command a --block-size that divides it"
        problems.append(SettingProblem("LMC_CHUNK", str(settings.chunk), message))
    if vllm.lora and not settings.allow_lora and (settings.inject or vllm.transfer_config):
        problems.append(
            SettingProblem(
                "--enable-lora",
                None,
                "LMCache's keys ignore the adapter, so that one adapter's KV cache would answer for "
                "another's; serve without LoRA, or set LMC_ALLOW_LORA=1 where only one adapter is ever used",
            )
        )
    return problems


def compact(value: object) -> str:
    """`value` as JSON without blanks."""
    return json.dumps(value, separators=(",", ":"))


def plain(value: float) -> str:
    """A number without a needless fraction or an exponent."""
    return str(int(value)) if value == int(value) else f"{value:.9f}".rstrip("0")


def vllm_words(argv: Sequence[str]) -> list[str] | None:
    """The arguments after `vllm serve` or its module; None where the command is neither."""
    argv = list(argv)
    if not argv:
        return None
    program = os.path.basename(argv[0])
    if program == "vllm":
        return argv[2:] if argv[1:2] == ["serve"] else None
    if not re.fullmatch(r"python[0-9.]*", program) or "-m" not in argv:
        return None
    at = argv.index("-m")
    interpreter, rest = argv[1:at], argv[at + 1 :]
    if not rest or rest[0] not in _VLLM_MODULES or not _is_flags(interpreter):
        return None
    if rest[0].endswith("cli.main"):
        return rest[2:] if rest[1:2] == ["serve"] else None
    return rest[1:]


def _is_flags(words: Iterable[str]) -> bool:
    """Whether `words` are options of the interpreter, of which -W and -X may have their value apart."""
    before = ""
    for word in words:
        if not word.startswith("-") and before not in ("-W", "-X"):
            return False
        before = word
    return True
