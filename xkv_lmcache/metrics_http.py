"""The HTTP port of plugin and gateway: `/metrics`, `/livez`, `/readyz`, `/status`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

TEXT: Final = "text/plain; charset=utf-8"
PATIENCE_S: Final = 10
"""How long a client may take for its request."""


@dataclass(frozen=True)
class Source:
    """What is served: series, the state for `/status`, and the reasons why it is not ready, none when it is."""

    collector: Collector
    status: Callable[[], object]
    troubles: Callable[[], list[str]]


class MetricsServer:
    """Serves `source` on an address until it is closed.

    Raises `OSError`, with the address and the cure, when it cannot be listened on. The threads end with the process.
    """

    def __init__(self, host: str, port: int, source: Source) -> None:
        registry = CollectorRegistry()
        registry.register(source.collector)
        ProcessCollector(registry=registry)

        class Handler(_Handler):
            pages = _pages(registry, source)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that leaves early is nobody's concern."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            text = f"metrics_port={port} on {host} cannot be listened on ({error.strerror}); choose another"
            raise OSError(error.errno, text) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="xkv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


Page = Callable[[], tuple[int, str, bytes]]


def _pages(registry: CollectorRegistry, source: Source) -> dict[str, Page]:
    def metrics() -> tuple[int, str, bytes]:
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

    def livez() -> tuple[int, str, bytes]:
        return 200, TEXT, b"alive\n"

    def readyz() -> tuple[int, str, bytes]:
        troubles = source.troubles()
        text = "\n".join(["not ready", *troubles] if troubles else ["ready"]) + "\n"
        return 503 if troubles else 200, TEXT, text.encode()

    def status() -> tuple[int, str, bytes]:
        return 200, "application/json", json.dumps(source.status()).encode()

    return {"/metrics": metrics, "/livez": livez, "/readyz": readyz, "/status": status}


class _Handler(BaseHTTPRequestHandler):
    pages: dict[str, Page]
    timeout = PATIENCE_S
    server_version = "xkv"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(self.pages)
            self._answer(404, TEXT, f"there are {known}\n".encode())
            return
        try:
            found = page()
        except Exception as error:  # noqa: BLE001 (whatever it is, the probe gets an answer)
            found = 500, TEXT, f"{type(error).__name__}: {error}\n".encode()
        self._answer(*found)

    do_HEAD = do_GET

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep probes out of the log."""
