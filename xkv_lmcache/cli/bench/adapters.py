"""The adapters that are compared: each a name and what LMCache's `--l2-adapter` takes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spec = dict[str, Any]

MIB, GIB = 1 << 20, 1 << 30


def _plugin(module: str, name: str, **params: Any) -> Spec:
    return {"type": "native_plugin", "module_path": module, "class_name": name, "adapter_params": params}


def store_gb(objects: int, size: int) -> float:
    """GiB of a store of ours that holds so many objects of `size` bytes."""
    return max(0.5, 1.1 * objects * (size + MIB) / GIB)


def xkv(**params: Any) -> Spec:
    """Our adapter with these parameters."""
    return _plugin("xkv_lmcache", "XkvL2Connector", **params)


def _xkv(folder: Path, objects: int, size: int, **params: Any) -> Spec:
    return xkv(store=str(folder), store_gb=store_gb(objects, size), **params)


def _floor(folder: Path, objects: int, size: int) -> Spec:
    return _plugin("xkv_lmcache.cli.bench.floor", "Connector")


def _fs_native(folder: Path, objects: int, size: int, **options: Any) -> Spec:
    return {"type": "fs_native", "base_path": str(folder), **options}


def _raw_block(folder: Path, objects: int, size: int, **options: Any) -> Spec:
    slot, meta = size + 4096, 64 * MIB
    path = folder / "raw_block"
    with open(path, "ab") as file:
        os.truncate(file.fileno(), meta + slot * (objects + 8))
    return {
        "type": "raw_block",
        "device_path": str(path),
        "slot_bytes": slot,
        "meta_total_bytes": meta,
        **options,
    }


_LARGE: dict[str, Any] = {"fragment_bytes": 512 * 1024, "batch_slots": 256}
"""Fragments for objects of many MiB, and as much memory for slots as by default."""

GATEWAY = "xkv gateway"
"""Ours through a gateway, which has the store: its specification is known when the gateway runs."""

# What makes an adapter's specification from a folder that it may use, and the most objects of a size in it at once.
ADAPTERS: dict[str, Callable[[Path, int, int], Spec]] = {
    "xkv full": _xkv,
    "xkv sample": lambda *place: _xkv(*place, verify="sample"),
    "xkv off": lambda *place: _xkv(*place, verify="off"),
    "xkv full 512k": lambda *place: _xkv(*place, **_LARGE),
    "xkv sample 512k": lambda *place: _xkv(*place, **_LARGE, verify="sample"),
    "floor": _floor,
    "fs_native": _fs_native,
    "fs_native direct": lambda *place: _fs_native(*place, use_odirect=True),
    "raw_block": _raw_block,
    "raw_block uring": lambda *place: _raw_block(*place, io_engine="io_uring"),
}
"""`floor` does nothing behind LMCache's wrapper of native connectors; the others of LMCache are its own."""

DEFAULT = ["xkv full", "xkv sample", GATEWAY, "floor", "fs_native", "fs_native direct", "raw_block"]

ALL = [*ADAPTERS, GATEWAY]


def missing(name: str) -> str | None:
    """What has to be installed for this adapter; None when it can be used."""
    if name.startswith("raw_block") and importlib.util.find_spec("lmcache_rust_raw_block_io") is None:
        return "lmcache-rust-raw-block-io"
    return None
