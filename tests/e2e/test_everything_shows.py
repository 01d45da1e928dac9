"""Whatever happens shows in the log line, the statistics file, the metrics and `xkv top`, under its own cause, and nothing
else moves: the real LMCache server and the real vLLM are led through the life of a tier, on a gateway whose file system
is small.

All counters are kept as they should be by now; each stage says what it adds. A counter that moves late, or for another
reason, is found by the next stage at the latest.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.gateway import GatewayProcess
from demo.stack import CHUNK, ONE_THREAD, Answer, Hits, Serving, free_ports
from tests.monitoring.conftest import await_that, series
from xkv_lmcache.cli.top import TROUBLES
from xkv_lmcache.metrics import LOOKUP_MISS_CAUSES, MISS_CAUSES, OPERATIONS, STORE_OUTCOMES

pytestmark = [pytest.mark.lmcache, pytest.mark.vllm, pytest.mark.timeout(1200)]

HTTP = httpx.Client(trust_env=False, timeout=10)

OBJECT_BYTES = 32 * 1024 * CHUNK
STORE_GB = 0.1
"""Room for ten objects or so."""
FILE_SYSTEM_BYTES = 128 << 20
OBJECTS = 3

LINE = re.compile(
    r"INFO lookups (?P<exists_hits>\d+)/(?P<exists_keys>\d+) hit; loads (?P<get_hits>\d+)/(?P<get_keys>\d+) hit, .*?; "
    r"stores (?P<stored>\d+) stored (?P<skipped>\d+) skipped (?P<deduped>\d+) deduped, .*?; "
    r"(?P<dropped>\d+) dropped (?P<poisoned>\d+) poisoned (?P<rejected>\d+) rejected (?P<failed>\d+) failed; "
    r"(?P<not_verified>\d+) not verified (?P<discarded>\d+) discarded; .*?; gateway (?P<session>\w+) for"
)
FAILED = ("store_too_old", "store_stalled", "store_deleted", "store_unreachable", "store_failed")
GATEWAY_TROUBLES = {
    "failed_reads": "reads failed",
    "failed_writes": "writes or commits failed",
    "rejected": "objects found no room",
    "discarded": "objects discarded as damaged",
}


def text(seed: int, objects: int) -> str:
    """A prompt of that many whole objects; what is generated fills no other one."""
    length = objects * CHUNK + 60
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def flat(state: dict[str, Any]) -> dict[str, int]:
    """Every counter of the statistics file that is above 0 and counts keys or sessions, by one name each."""
    found = {name: state[name] for name in ("discarded", "withheld")}
    for prefix, names in (
        ("store_", STORE_OUTCOMES),
        ("load_miss_", MISS_CAUSES),
        ("lookup_miss_", LOOKUP_MISS_CAUSES),
    ):
        for name in names:
            found[prefix + name] = state[prefix + name]
    for operation in OPERATIONS:
        for name in ("keys", "hits"):
            found[f"{operation}_{name}"] = state["operations"][operation][name]
    for name in ("opened", "lost"):
        found[f"sessions_{name}"] = state["session"][name]
    return {name: value for name, value in found.items() if value}


def flat_metrics(samples: dict[str, float]) -> dict[str, int]:
    """The same of the series on the LMCache server's `/metrics`."""
    found: dict[str, int] = {}
    for name, value in samples.items():
        labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
        base = name.partition("{")[0]
        key = {
            "xkv_stores_total": f"store_{labels.get('outcome')}",
            "xkv_load_misses_total": f"load_miss_{labels.get('cause')}",
            "xkv_lookup_misses_total": f"lookup_miss_{labels.get('cause')}",
            "xkv_operation_keys_total": f"{labels.get('operation')}_keys",
            "xkv_operation_hits_total": f"{labels.get('operation')}_hits",
            "xkv_discarded_objects_total": "discarded",
            "xkv_withheld_fragments_total": "withheld",
            "xkv_sessions_opened_total": "sessions_opened",
            "xkv_sessions_lost_total": "sessions_lost",
        }.get(base)
        if key is not None and value:
            found[key] = int(value)
    return found


class Tier:
    """The whole of it, and every place where it shows."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.file_system = folder / "small"
        self.file_system.mkdir()
        size = f"size={FILE_SYSTEM_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.file_system)], check=True)
        (self.metrics_port,) = free_ports(1)
        self.stats = folder / "stats.json"
        self.gateway = GatewayProcess(
            self.file_system / "store",
            fragment_bytes="auto",
            store_gb=STORE_GB,
            metrics_port=self.metrics_port,
            log=folder / "gateway.log",
        )
        self.gateway.start()
        params = {
            **self.gateway.params,
            "wait_timeout_s": 2.0,
            "stats_path": str(self.stats),
            "stats_interval_s": 0.5,
        }
        self.serving = Serving(model, folder / "serving.log", params, ONE_THREAD)
        self.expected: Counter[str] = Counter()
        self.expected_gateway: Counter[str] = Counter()

    def close(self) -> None:
        self.serving.__exit__(None, None, None)
        self.gateway.__exit__()
        subprocess.run(["umount", str(self.file_system)], check=True)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stats.read_text())
        return found

    def damage(self) -> None:
        """Changes the first byte of every slot."""
        (file,) = (self.file_system / "store").glob("*.dat")
        with file.open("r+b") as drive:
            header = drive.read(104)
            slot_bytes = int.from_bytes(header[64:68], "little")
            slots, offset = (int.from_bytes(header[at : at + 8], "little") for at in (72, 80))
            for slot in range(slots):
                drive.seek(offset + slot * slot_bytes)
                byte = drive.read(1)
                drive.seek(-1, os.SEEK_CUR)
                drive.write(bytes([byte[0] ^ 1]))

    def await_session(self, state: str) -> None:
        await_that(f"a session that is {state}", lambda: self.state()["session"]["state"] == state or None)

    def ask(self, prompt: str, *, l1: int = 0, l2: int = 0) -> Answer:
        """An answer of which that many objects come from the tiers; returns once everything is stored."""
        answer, hits = self.serving.ask(prompt, 4)
        assert (hits.l1, hits.l2) == (l1, l2) or hits == Hits(0, 0, 0) == Hits(0, l1, l2)
        assert answer.cached_tokens == (l1 + l2) * CHUNK
        self.serving.settle(0)
        return answer

    def shows(self, gateway: dict[str, int] | None = None, **added: int) -> None:
        """All places agree that since the last stage these counters moved, and no other."""
        self.expected.update(added)
        self.expected_gateway.update(gateway or {})
        wanted = {name: value for name, value in self.expected.items() if value}

        def counted() -> dict[str, Any] | None:
            state = self.state()
            return state if flat(state) == wanted else None

        try:
            state = await_that("the statistics", counted, 20)
        except AssertionError:
            assert flat(self.state()) == wanted
            raise

        metrics = HTTP.get(self.serving.server_url("/metrics")).text
        assert flat_metrics(series(metrics)) == wanted

        def line() -> dict[str, str] | None:
            said = self.serving.service.log.since(0)
            last = said.rindex("INFO lookups ")
            found = LINE.search(said, last)
            return found.groupdict() if found and self.matches(found.groupdict(), state) else None

        await_that(f"a line that says {wanted}", line)
        self.top_shows(state)

    def matches(self, line: dict[str, str], state: dict[str, Any]) -> bool:
        def of(name: str) -> int:
            return self.expected[name]

        wanted = {
            **{
                name: of(name) for name in ("exists_hits", "exists_keys", "get_hits", "get_keys", "discarded")
            },
            **{name: of(f"store_{name}") for name in ("stored", "skipped", "deduped", "dropped", "poisoned")},
            "rejected": of("store_rejected_by_card"),
            "failed": sum(map(of, FAILED)),
            "not_verified": of("load_miss_not_verified"),
        }
        return line == {
            **{name: str(value) for name, value in wanted.items()},
            "session": state["session"]["state"],
        }

    def top_shows(self, state: dict[str, Any]) -> None:
        arguments = [
            "--once",
            "--interval",
            "0.1",
            "--stats",
            str(self.stats),
            "--port",
            str(self.gateway.port),
        ]
        command = [sys.executable, "-m", "xkv_lmcache.cli", "top", *arguments]
        env = {**os.environ, "COLUMNS": "160"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
        shown = done.stdout
        of = self.expected
        for wanted in (
            f"lookups  {of['exists_hits']} of {of['exists_keys']} hit",
            f"loads    {of['get_hits']} of {of['get_keys']} (",
            f"stores   {of['store_stored']} stored, {of['store_skipped']} skipped, {of['store_deduped']} deduped",
            f"session  {state['session']['state']} for",
        ):
            assert wanted in shown, (wanted, shown + done.stderr)
        troubles = {f"{of[name]} {words}" for name, words in TROUBLES if of[name]}
        plugin, _, below = shown.partition("╭─ gateway ")
        assert {line for line in complaints(plugin) if line[0].isdigit()} == troubles

        wanted_gateway = {name: value for name, value in self.expected_gateway.items() if value}
        if state["session"]["state"] != "open":
            return  # It is frozen or gone.
        status = self.gateway.status()
        names = ("committed", "evicted", "removed", "failed_reads", "failed_writes", "rejected", "discarded")
        assert {name: status[name] for name in names if status[name]} == wanted_gateway
        samples = series(HTTP.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text)
        exposed = {
            "committed": "xkv_store_committed_objects_total",
            "evicted": "xkv_store_evicted_objects_total",
            "removed": "xkv_store_removed_objects_total",
            "discarded": "xkv_store_discarded_objects_total",
            "failed_reads": "xkv_gateway_failed_reads_total",
            "failed_writes": "xkv_gateway_failed_writes_total",
            "rejected": "xkv_gateway_rejected_objects_total",
        }
        assert {
            name: int(samples[exposed[name]]) for name in names if samples[exposed[name]]
        } == wanted_gateway
        assert (
            f"{status['objects']} objects; {status['evicted']} evicted, {status['discarded']} discarded"
            in below
        )
        troubles = {
            f"{of} {GATEWAY_TROUBLES[name]}"
            for name, of in wanted_gateway.items()
            if name in GATEWAY_TROUBLES
        }
        assert {line for line in complaints(below) if line[0].isdigit()} == troubles


def complaints(shown: str) -> list[str]:
    return re.findall(r"! (.*?) *│", shown)


@pytest.fixture
def tier(tmp_path: Path, tiny_model: Path) -> Iterator[Tier]:
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    tier = Tier(tmp_path, tiny_model)
    try:
        yield tier
    finally:
        tier.close()


def test_each_event_shows_under_its_own_name(tier: Tier) -> None:
    serving, gateway = tier.serving, tier.gateway
    serving.wait_until_ready()
    tier.shows(sessions_opened=1)
    first = text(1, OBJECTS)

    # Stored.
    right = tier.ask(first).tokens
    new = {"exists_keys": OBJECTS, "lookup_miss_absent": OBJECTS, "set_keys": OBJECTS}
    tier.shows({"committed": OBJECTS}, **new, set_hits=OBJECTS, store_stored=OBJECTS)

    # A hit in L1 is none of ours.
    assert tier.ask(first, l1=OBJECTS).tokens == right
    tier.shows()

    # A hit in L2.
    hit = {"exists_keys": OBJECTS, "exists_hits": OBJECTS, "get_keys": OBJECTS, "get_hits": OBJECTS}
    serving.clear_l1()
    assert tier.ask(first, l2=OBJECTS).tokens == right
    tier.shows(**hit)

    # No room: something else takes what is left of the file system.
    filler = tier.file_system / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    tier.ask(text(2, 1))
    lost = {"exists_keys": 1, "lookup_miss_absent": 1, "set_keys": 1}
    tier.shows({"rejected": 1}, **lost, store_rejected_by_card=1)
    filler.unlink()

    # Damage: a byte of every fragment changes on the drive. The first one that is read answers for its object; how many
    # of the others come after that answer is a matter of time. So is whether LMCache 0.5.4 hands the unfilled buffers
    # back as stores before it deletes them (test_poison.py).
    serving.clear_l1()
    tier.damage()
    assert tier.ask(first).tokens == right
    state = await_that(
        "the objects stored again", lambda: (s := tier.state())["store_stored"] == 2 * OBJECTS and s or None
    )
    withheld, poisoned = state["withheld"], state["store_poisoned"]
    assert poisoned <= OBJECTS
    assert withheld < OBJECTS * OBJECT_BYTES // tier.gateway.status()["fragment_bytes"]
    tier.shows(
        {"discarded": OBJECTS, "committed": OBJECTS},
        exists_keys=OBJECTS,
        exists_hits=OBJECTS,
        get_keys=OBJECTS,
        load_miss_not_verified=OBJECTS,
        discarded=OBJECTS,
        withheld=withheld,
        store_poisoned=poisoned,
        set_keys=OBJECTS + poisoned,
        set_hits=OBJECTS,
        store_stored=OBJECTS,
    )

    # More than there is room for: the oldest goes.
    serving.clear_l1()
    for seed in range(10, 14):
        tier.ask(text(seed, OBJECTS))
    many = {name: 4 * value for name, value in new.items()}
    evicted = gateway.status()["evicted"]
    assert evicted > 0
    tier.shows(
        {"committed": 4 * OBJECTS, "evicted": evicted}, **many, set_hits=4 * OBJECTS, store_stored=4 * OBJECTS
    )

    # A gateway that freezes: a lookup waits for it until its time or the session is over, the next one does not; what is
    # computed is not stored.
    serving.clear_l1()
    with gateway.frozen():
        tier.ask(text(20, 1))
        tier.await_session("lost")
        waited = {"lookup_miss_deadline": tier.state()["lookup_miss_deadline"]}
        assert waited["lookup_miss_deadline"] <= 1
        tier.ask(text(21, 1))
        waited["lookup_miss_unreachable"] = 2 - waited["lookup_miss_deadline"]
        tier.shows(**waited, exists_keys=2, set_keys=2, store_unreachable=2, sessions_lost=1)
    tier.await_session("open")
    tier.shows(sessions_opened=1)

    # Another gateway on the same store: its counters begin anew, the plugin's do not.
    gateway.restart()
    tier.expected_gateway.clear()
    await_that("a session with it", lambda: tier.state()["session"]["lost"] == 2 or None)
    tier.await_session("open")
    tier.shows(sessions_lost=1, sessions_opened=1)

    # Another server: the plugin's begin anew, what was stored is there.
    latest = text(13, OBJECTS)
    serving.end_server(signal.SIGTERM)
    tier.expected.clear()
    tier.shows(sessions_opened=1)
    tier.ask(latest, l2=OBJECTS)
    tier.shows(**hit)
