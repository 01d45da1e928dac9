"""LMCache's own benchmark of an L2 adapter, with its check of the data, on every kind of drive and with both I/O engines.

Its exit code is 0 even when every store failed: what counts is the numbers it prints.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LoopDevices

pytestmark = [pytest.mark.lmcache, pytest.mark.matrix]

MIB = 1 << 20
ENGINE_NAMES = {"uring": "io_uring", "pool": "pool"}


def bench(
    store: list[Path], engine: str, *, align: int, folder: Path
) -> tuple[dict[str, dict[str, float]], str]:
    """Runs the benchmark; returns its figures by operation, and everything it printed."""
    adapter = {
        "type": "native_plugin",
        "module_path": "xkv_lmcache",
        "class_name": "XkvL2Connector",
        "adapter_params": {"store": [str(path) for path in store], "store_gb": 0.5, "io_engine": engine},
    }
    command = [
        str(Path(sys.executable).parent / "lmcache"),
        "bench",
        "l2",
        "--l2-adapter",
        json.dumps(adapter),
    ]
    # 1,001 KiB: not a whole number of fragments, of pages or of sectors.
    command += ["--num-keys", "8", "--in-flight", "3", "--rounds", "2", "--warmup-rounds", "1"]
    command += ["--data-size-kb", "1001", "--l1-align-bytes", str(align), "--lookup-max-hit-rate", "0.5"]
    command += ["--no-skip-verify", "--format", "json", "--output", str(folder / "result.json")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return {op["operation"]: op for name, op in metrics.items() if name.startswith("op_")}, ran.stdout


@pytest.mark.parametrize("engine", ["uring", "pool"])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("medium", ["file", "block"])
def test_all_stored_found_loaded_and_verified(
    medium: str, drives: int, engine: str, tmp_path: Path, loop_devices: LoopDevices
) -> None:
    if medium == "block":
        store = loop_devices(drives, 512 * MIB)
    else:
        store = [tmp_path / f"store-{index}" for index in range(drives)]
        for folder in store:
            folder.mkdir()
    # Buffers of one drive's runs are not aligned for direct I/O, those of two drives' are.
    figures, output = bench(store, engine, align=1 if drives == 1 else 4096, folder=tmp_path)
    assert figures.keys() == {"Store", "Lookup", "Load"}, output
    assert all(each["rounds_timed_out"] == 0 for each in figures.values()), output
    assert figures["Store"]["total_keys"] == figures["Store"]["total_success"] == 48, output
    assert figures["Load"]["total_keys"] == figures["Load"]["total_success"] == 48, output
    assert figures["Lookup"]["total_keys"] == 48, output
    assert figures["Lookup"]["total_success"] == figures["Lookup"]["expected_hit_count"] == 24, output
    assert re.search(r"All 24 keys data verified OK", output), output
    for path in store:
        assert re.search(rf"{re.escape(str(path))}\S* \({ENGINE_NAMES[engine]}", output), output
