"""The two ways to a store, for tests that must pass through both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.gateway import GatewayProcess

OF_THE_STORE = ("store_gb", "fragment_bytes", "io_engine", "direct_io")
"""Parameters that an embedded store takes itself, and that its gateway takes where there is one."""


class Backend:
    """Reaches stores in the connector's own process (`embedded`), or in a gateway's (`gateway`), one per store. With
    `sharing` the gateway's clients read its drives themselves."""

    def __init__(self, kind: str, sharing: bool = False) -> None:
        self.kind = kind
        self._sharing = "on" if sharing else "off"
        self.gateways: dict[Path, GatewayProcess] = {}
        """By the first drive of their store."""

    def params(self, store: Path | list[Path], **params: Any) -> dict[str, Any]:
        """The connector's parameters for `store`; starts its gateway if it has none yet."""
        drives = store if isinstance(store, list) else [store]
        if self.kind == "embedded":
            return {"store": [str(drive) for drive in drives], **params}
        settings = {key: value for key, value in params.items() if key in OF_THE_STORE}
        if drives[0] not in self.gateways:
            settings = {"fragment_bytes": "auto", "share_drives": self._sharing, **settings}
            gateway = GatewayProcess(drives, **settings)
            self.gateways[drives[0]] = gateway
            gateway.start()
        rest = {key: value for key, value in params.items() if key not in OF_THE_STORE}
        return {**self.gateways[drives[0]].params, **rest}

    def release(self, store: Path) -> None:
        """Returns when nobody has `store` open, once its connectors are closed."""
        if gateway := self.gateways.pop(store, None):
            code = gateway.end()
            gateway.__exit__()
            assert code == 0, gateway.log.read_text()

    def usage(self, store: Path, stats: dict[str, Any]) -> dict[str, int]:
        """`objects`, `slots_used` and `slots_total` of `store`; `stats` are those of its connector."""
        found: dict[str, int] = self.gateways[store].status() if self.kind == "gateway" else stats["store"]
        return found

    def close(self) -> None:
        """Ends every gateway."""
        for gateway in self.gateways.values():
            gateway.__exit__()
        self.gateways.clear()
