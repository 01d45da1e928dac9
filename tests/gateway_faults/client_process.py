"""A connector in a process of its own, which does what it is told on standard input, one JSON object a line.

    python -m tests.gateway_faults.client_process PARAMS_JSON

`{"do": "set", "numbers": [...]}` answers whether those objects were stored; `get` how many of them were loaded right,
loaded wrong and not at all; `load` the same, and says `loading` once they are submitted; `churn`, for `seconds`, the same
over many batches, and the longest one's seconds; with `store`, each batch is removed and stored again too. `session`
answers the session's state, `localhost` the addresses of that name.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.plugin.client import Client
from tests.plugin.objects import content, key

BATCH = 8


def store(client: Client, numbers: Sequence[int]) -> bool:
    return client.set({key(number): content(number) for number in numbers})


def load(
    client: Client, numbers: Sequence[int], submitted: Callable[[], None] = lambda: None
) -> dict[str, int]:
    found = client.get({key(number): len(content(number)) for number in numbers}, submitted)
    outcome = {"right": 0, "wrong": 0, "missing": 0}
    for number in numbers:
        data = found[key(number)]
        outcome["missing" if data is None else "right" if data == content(number) else "wrong"] += 1
    return outcome


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def churn(client: Client, numbers: Sequence[int], seconds: float, store_too: bool) -> dict[str, float]:
    choice = random.Random(len(numbers))
    total: dict[str, float] = {"right": 0, "wrong": 0, "missing": 0, "batches": 0, "longest_s": 0.0}
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        batch = choice.sample(numbers, min(BATCH, len(numbers)))
        if store_too:
            client.delete([key(number) for number in batch[:2]])
            store(client, batch)
        for name, count in load(client, batch).items():
            total[name] += count
        total["batches"] += 1
        total["longest_s"] = max(total["longest_s"], time.monotonic() - begun)
    return total


def main() -> None:
    with Client(**json.loads(sys.argv[1])) as client:
        say("ready")
        for line in sys.stdin:
            told: dict[str, Any] = json.loads(line)
            numbers = told.get("numbers", [])
            outcome: object
            match told["do"]:
                case "set":
                    outcome = store(client, numbers)
                case "get":
                    outcome = load(client, numbers)
                case "load":
                    outcome = load(client, numbers, lambda: say("loading"))
                case "churn":
                    say("churning")
                    outcome = churn(client, numbers, told["seconds"], told.get("store", False))
                case "session":
                    outcome = client.connector.stats()["session"]
                case "localhost":
                    outcome = [
                        each[4][0] for each in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)
                    ]
                case other:
                    raise ValueError(other)
            say(outcome)


if __name__ == "__main__":
    main()
