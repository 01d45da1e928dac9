"""`make bench`: LMCache's own benchmark of an L2 adapter, ours beside LMCache's `fs_native`, on the same drive; then our
embedded store beside a gateway's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import ring
from demo.stack import ROOT

NUM_KEYS, IN_FLIGHT, ROUNDS, SIZE_KB = 8, 4, 3, 4096


@dataclass(frozen=True)
class Result:
    """The benchmark's figures by operation (`Store`, `Lookup`, `Load`), and everything it printed."""

    figures: dict[str, dict[str, float]]
    output: str


def plugin(**adapter_params: Any) -> dict[str, Any]:
    """The specification of our adapter with these parameters, as LMCache wants it."""
    return {
        "type": "native_plugin",
        "module_path": "xkv_lmcache",
        "class_name": "XkvL2Connector",
        "adapter_params": adapter_params,
    }


def bench_l2(
    adapter: dict[str, Any],
    *,
    num_keys: int,
    in_flight: int,
    rounds: int,
    size_kb: int,
    align: int,
    warmup: int = 0,
) -> Result:
    """Runs `lmcache bench l2` with its check of the data.

    Args:
        adapter: specification of the L2 adapter.
        num_keys: objects per batch; in_flight: batches at once; rounds: measured, after `warmup` that are not.
        size_kb: KiB of an object; align: alignment of its buffer in bytes.

    Raises:
        RuntimeError: a check failed or an operation had no answer. Objects that were not stored are no error to the
            benchmark: compare `total_success` with `total_keys`.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            str(Path(sys.executable).parent / "lmcache"),
            "bench",
            "l2",
            "--l2-adapter",
            json.dumps(adapter),
        ]
        command += ["--num-keys", str(num_keys), "--in-flight", str(in_flight), "--rounds", str(rounds)]
        command += [
            "--warmup-rounds",
            str(warmup),
            "--data-size-kb",
            str(size_kb),
            "--l1-align-bytes",
            str(align),
        ]
        command += [
            "--lookup-max-hit-rate",
            "0.5",
            "--no-skip-verify",
            "--format",
            "json",
            "--output",
            str(output),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        printed = ran.stdout + ran.stderr
        if ran.returncode != 0:
            raise RuntimeError(f"lmcache bench l2 ended with exit code {ran.returncode}:\n{printed}")
        metrics = json.loads(output.read_text())["metrics"]
    return Result({op["operation"]: op for name, op in metrics.items() if name.startswith("op_")}, printed)


def main() -> int:
    run = ROOT / ".run"
    run.mkdir(exist_ok=True)
    table = Table(
        title=f"lmcache bench l2: {NUM_KEYS * IN_FLIGHT} objects of {SIZE_KB} KiB at once, {ROUNDS} rounds"
    )
    for title in ("adapter", "operation", "objects done", "MiB/s, average", "worst round", "best round"):
        table.add_column(title, justify="left" if title in ("adapter", "operation") else "right")
    with tempfile.TemporaryDirectory(dir=run) as folder:
        adapters = {
            "xkv, verify=full": plugin(store=f"{folder}/full", store_gb=2),
            "xkv, verify=off": plugin(store=f"{folder}/off", store_gb=2, verify="off"),
            "fs_native, direct I/O": {
                "type": "fs_native",
                "base_path": f"{folder}/direct",
                "use_odirect": True,
            },
            "fs_native, page cache": {"type": "fs_native", "base_path": f"{folder}/cached"},
        }
        for name, adapter in adapters.items():
            print(f"{name} ...", flush=True)
            options = {
                "num_keys": NUM_KEYS,
                "in_flight": IN_FLIGHT,
                "rounds": ROUNDS,
                "size_kb": SIZE_KB,
                "align": 4096,
                "warmup": 1,
            }
            figures = bench_l2(adapter, **options).figures
            for operation in ("Store", "Load"):
                each = figures[operation]
                rates = (each[f"throughput_{which}_mbps"] for which in ("avg", "min", "max"))
                done = f"{each['total_success']}/{each['total_keys']}"
                table.add_row(name, operation, done, *(f"{rate:.0f}" for rate in rates))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    print(
        "xkv answers a store when it is committed and flushed to the drive. Loads of fs_native without direct I/O come"
    )
    print("from the page cache. The data of the last round of loads was checked.")
    console.print(ring.comparison(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
