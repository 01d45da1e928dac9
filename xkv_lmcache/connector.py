"""The connector: the native class behind LMCache's adapter contract, with its parameters checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self

from xkv_lmcache import _native
from xkv_lmcache._native import Connector
from xkv_lmcache.lmcache_log import QUIET_S, bound_refused_stores
from xkv_lmcache.params import DEFAULT_METRICS_HOST, DEFAULT_SHM_DIR, AdapterParams

try:
    # Puts the series on the registry that LMCache's server exposes.
    from xkv_lmcache import plugin_metrics
except ImportError:  # An environment without prometheus_client: everything else works.
    plugin_metrics = None  # type: ignore[assignment]


class XkvL2Connector(Connector):
    """A connector to a store of KV cache objects, as LMCache's `native_plugin` adapter wants it.

    Its keyword arguments are the adapter parameters, see `xkv_lmcache.params.AdapterParams`. The constructor raises
    `ValueError` for parameters that cannot work, a drive with something else on it or a gateway that refuses for good
    (token, fragment size, protocol version), `OSError` where the system refuses; it takes nothing with it then. A gateway
    that cannot be reached is no error: until it can, everything is a miss.

    `submit_batch_get`, `submit_batch_set`, `submit_batch_exists` and `submit_batch_delete` return an id at once and never
    raise. `drain_completions` returns what was answered since: `(id, ok, error, result_bools)`, with one bool per key for
    get, exists and delete and None for set. `close` takes at most 5 seconds.

    Its series are on prometheus_client's default registry, and with `metrics_port` on a port of their own with
    `/livez`, `/readyz` and `/status`.
    """

    _withdraw: Callable[[], None] | None = None

    def __new__(cls, **adapter_params: Any) -> Self:
        """Validate the parameters and open the store."""
        params = AdapterParams.parse(adapter_params)
        if params.metrics_port is not None:
            if plugin_metrics is None:
                raise ValueError(
                    f"metrics_port={params.metrics_port} needs the package prometheus_client; install it in the "
                    "server's environment"
                )
            host = params.metrics_host or DEFAULT_METRICS_HOST
            # Before the store is opened: a port that is taken is found first.
            plugin_metrics.listen(host, params.metrics_port)
        self = super().__new__(
            cls,
            store=params.store_paths,
            defaulted=params.defaulted,
            store_gb=params.store_gb,
            host=params.gateway_host,
            port=params.gateway_port,
            shm_dir=params.shm_dir or DEFAULT_SHM_DIR,
            token_file=params.token_file,
            reopen_after_s=params.reopen_after_s,
            fragment_bytes=params.wanted_fragment_bytes,
            batch_slots=params.batch_slots,
            copy_threads=None if params.copy_threads == "auto" else params.copy_threads,
            verify=params.verify,
            wait_timeout_s=params.wait_timeout_s,
            load_deadline_s=params.load_deadline_s,
            store_deadline_s=params.store_deadline_s,
            max_pending_store_mb=params.max_pending_store_mb,
            namespace=params.namespace,
            stats_interval_s=params.stats_interval_s,
            stats_path=params.stats_path,
            io_engine=params.io_engine,
            direct_io=params.direct_io,
        )
        if plugin_metrics is not None:
            self._withdraw = plugin_metrics.show(self)
        if bound_refused_stores():
            _native.log(
                "info",
                "LMCache's own warnings about refused stores are kept in bounds: the first in full, then their number "
                f"every {QUIET_S:g} s; causes and counts are in these lines and in the statistics",
            )
        return self

    def close(self) -> None:
        """End it, within 5 seconds; its series go with it."""
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()
        super().close()

    def stats(self) -> dict[str, Any]:
        """Everything that is counted; `docs/stats.md` describes it."""
        counted: dict[str, Any] = json.loads(self.stats_json())
        return counted
