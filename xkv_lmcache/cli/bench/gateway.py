"""The gateway behind the adapter `xkv gateway`: a process with a store of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

START_S = 30.0


class Gateway:
    """Serves a store of `store_gb` GiB in `folder` while it is entered.

    Raises:
        RuntimeError: it does not listen within `START_S` seconds.
    """

    def __init__(self, folder: Path, store_gb: float) -> None:
        self._log = folder / "gateway.log"
        # A socket's path is short.
        self._shared = tempfile.mkdtemp(prefix="xkv-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._command = [sys.executable, "-m", "xkv_lmcache.cli", "gateway", "serve", f"--store={folder}"]
        self._command += [f"--store-gb={store_gb}", f"--port={self._port}", f"--shm-dir={self._shared}"]
        # As with block devices, which a gateway is for: a file is only what there is here.
        self._command += ["--share-drives=on"]

    @property
    def params(self) -> dict[str, Any]:
        """What a connector needs to reach it."""
        return {"host": "127.0.0.1", "port": self._port, "shm_dir": self._shared}

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        # Settings of the user's own gateway are not for this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("XKV_GATEWAY_")}
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the gateway does not listen: {self._log.read_text()[-800:]}")
            time.sleep(0.05)
        return self

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._shared, ignore_errors=True)
