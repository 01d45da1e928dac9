"""`make run`: one prompt, answered cold, from L1, and from L2 after the server was killed and after all was restarted.

With `--gateway` (`make run GATEWAY=1`) the store is a gateway's, which is killed too while the server lives.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.gateway import DIES_WITH_PARENT, GatewayProcess
from demo.model import MODELS, make
from demo.stack import CHUNK, ROOT, Answer, Hits, Serving, StackError, ending_cleanly

RUN = ROOT / ".run"
STORE_GB = 2
L1 = "L1"
L2 = "L2"


@dataclass(frozen=True)
class Phase:
    """One asking of the prompt. `source` is the tier that must have answered, None where nothing may have."""

    name: str
    source: str | None
    answer: Answer
    hits: Hits


class Progress:
    """Lines with the time since the start, so that somebody who waits sees for what."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:4.0f} s] {text}", flush=True)


def prompt_of(model: str) -> str:
    """A text of about 4,000 tokens, the same every time."""
    words = ("object", "fragment", "slot", "manifest", "lease", "session", "ring", "store", "drive", "cache")
    choice = random.Random(20)
    # A token of the tiny model is a byte, one of SmolLM2 about a word of this vocabulary.
    length = 4000 if model == "tiny" else 21000
    text = "Repeat the list: "
    while len(text) < length:
        text += choice.choice(words) + " "
    return text[:length]


def faults(phases: list[Phase]) -> list[str]:
    """What is wrong with the outcome; empty when KV cache survived and every answer was the same."""
    found = []
    for phase in phases:
        objects = phase.answer.prompt_tokens // CHUNK
        wanted = (objects if phase.source == L1 else 0, objects if phase.source == L2 else 0)
        if (phase.hits.l1, phase.hits.l2) != wanted:
            found.append(
                f"{phase.name}: {phase.hits.l1} objects from L1 and {phase.hits.l2} from L2, "
                f"expected {wanted[0]} and {wanted[1]}"
            )
        if bool(phase.answer.cached_tokens) != bool(phase.source):
            found.append(f"{phase.name}: vLLM took {phase.answer.cached_tokens} tokens from the cache")
        if phase.answer.tokens != phases[0].answer.tokens:
            found.append(f"{phase.name}: the tokens differ from the cold answer's")
    return found


def table_of(phases: list[Phase]) -> Table:
    table = Table(title="The same prompt, each time")
    for title in (
        "phase",
        "first token",
        "prompt tokens",
        "from cache",
        "L1 objects",
        "L2 objects",
        "same tokens",
    ):
        table.add_column(title, justify="left" if title == "phase" else "right")
    for phase in phases:
        answer, hits = phase.answer, phase.hits
        same = "yes" if answer.tokens == phases[0].answer.tokens else "NO"
        row = (f"{answer.ttft_s:.2f} s", answer.prompt_tokens, answer.cached_tokens, hits.l1, hits.l2, same)
        table.add_row(phase.name, *map(str, row))
    return table


def play(
    model: str, run: Path, models: Path, say: Progress, *, through_gateway: bool = False
) -> tuple[list[Phase], Path]:
    """Plays all phases with its store and logs in the folder `run`; returns them and the store's folder."""
    say(f"model {model}: " + ("there" if (models / model / "complete").exists() else "making it"))
    folder = make(model, models)
    store = run / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    if not through_gateway:
        adapter_params = {"store": str(store), "store_gb": STORE_GB, "namespace": model}
        return phases_of(folder, run, adapter_params, prompt_of(model), None, say), store
    log = run / "gateway.log"
    log.unlink(missing_ok=True)
    say(f"starting the gateway; log: {log}")
    settings: dict[str, Any] = {"store_gb": STORE_GB, "fragment_bytes": "auto"}
    with GatewayProcess(store, log=log, prefix=DIES_WITH_PARENT, **settings) as gateway:
        adapter_params = {**gateway.params, "batch_slots": 1024, "namespace": model}
        return phases_of(folder, run, adapter_params, prompt_of(model), gateway, say), store


def phases_of(
    model: Path,
    run: Path,
    adapter_params: dict[str, Any],
    prompt: str,
    gateway: GatewayProcess | None,
    say: Progress,
) -> list[Phase]:
    """Asks `prompt` in every phase; with a `gateway`, also while that is dead and when it is back."""
    phases: list[Phase] = []

    def ask(name: str, source: str | None) -> None:
        answer, hits = serving.ask(prompt)
        phases.append(Phase(name, source, answer, hits))
        say(f"{name}: first token after {answer.ttft_s:.2f} s, {answer.cached_tokens} tokens from the cache")

    say(f"starting the LMCache server and vLLM; log: {run / 'first.log'}")
    with Serving(model, run / "first.log", adapter_params) as serving:
        serving.wait_until_ready(say)
        say("serving")
        ask("cold", None)
        serving.settle(phases[0].answer.prompt_tokens // CHUNK)
        ask("L1 hit", L1)
        say("kill -9 of the LMCache server; vLLM goes on, the launcher starts another server")
        serving.end_server(signal.SIGKILL)
        ask("L2 hit, server killed", L2)
        if gateway is not None:
            server = serving.server_pid()
            say("kill -9 of the gateway; the LMCache server and vLLM go on")
            gateway.end(signal.SIGKILL)
            ask("gateway killed", None)
            serving.settle(phases[0].answer.prompt_tokens // CHUNK)
            say("starting another gateway on the store; emptying L1")
            gateway.start()
            _await_session(gateway)
            serving.clear_l1()
            ask("L2 hit, gateway back", L2)
            if serving.server_pid() != server:
                raise StackError(f"the LMCache server was restarted; {serving.service.log.path}")
        say("ending vLLM and the server")
    say(f"starting both again on the same store; log: {run / 'second.log'}")
    with Serving(model, run / "second.log", adapter_params) as serving:
        serving.wait_until_ready(say)
        ask("L2 hit, all restarted", L2)
        say("ending vLLM and the server")
    return phases


def _await_session(gateway: GatewayProcess) -> None:
    """Returns when the LMCache server has found the gateway."""
    deadline = time.monotonic() + 30
    while not gateway.status()["sessions"]:
        if time.monotonic() > deadline:
            raise StackError(f"nobody has opened a session for 30 s; {gateway.log}")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=RUN, help="where its store and logs go; default: %(default)s"
    )
    parser.add_argument(
        "--models", type=Path, default=RUN / "models", help="where models are; default: %(default)s"
    )
    parser.add_argument("--gateway", action="store_true", help="the store is a gateway's")
    arguments = parser.parse_args()
    say = Progress()
    with ending_cleanly():
        phases, store = play(
            arguments.model,
            arguments.folder.resolve(),
            arguments.models.resolve(),
            say,
            through_gateway=arguments.gateway,
        )

    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table_of(phases))
    print(
        "Hits in L1 and L2 are the server's own count (its log line `Prefetch request completed`), one object"
    )
    print(
        f"is {CHUNK} tokens; `from cache` is vLLM's. The rest of the prompt, up to {CHUNK} tokens, is computed anew."
    )
    if wrong := faults(phases):
        for line in wrong:
            print(f"FAILED {line}", file=sys.stderr)
        return 1
    parameters: dict[str, Any]
    if arguments.gateway:
        parameters, first = {"host": "127.0.0.1", "port": 5557}, "LMC_XKV_PORT=5557"
        own = "xkv gateway serve --store=/var/lib/xkv --store-gb=200 &\n  "
    else:
        parameters = {"store": "/var/lib/xkv", "store_gb": 200}
        first, own = "LMC_XKV_STORE=/var/lib/xkv LMC_XKV_STORE_GB=200", ""
    print(f"""
The store is {store} ({STORE_GB} GiB). With a vLLM of your own, in an environment that has lmcache and this package:

  {own}LMC_ENABLE=1 LMC_L1_GB=20 {first} \\
    python3 -m xkv_lmcache_autostart -- vllm serve MODEL

or, for an LMCache server you start yourself:

  --l2-adapter '{{"type": "native_plugin", "module_path": "xkv_lmcache", "class_name": "XkvL2Connector",
    "adapter_params": {json.dumps(parameters)}}}'""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
