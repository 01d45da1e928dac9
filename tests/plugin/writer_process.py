"""Stores objects until it is killed, and says on standard output which were acknowledged.

Arguments: parameters of the connector as JSON, number of the first object. Output: `a N` before object N is submitted,
`s N` once it was acknowledged.
"""

import itertools
import json
import select
import sys

from tests.plugin.objects import IN_FLIGHT, batch
from xkv_lmcache import XkvL2Connector


def main() -> None:
    connector = XkvL2Connector(**json.loads(sys.argv[1]))
    running: dict[int, list[int]] = {}
    kept = []
    for first in itertools.count(int(sys.argv[2]), IN_FLIGHT):
        numbers = list(range(first, first + IN_FLIGHT))
        print(*(f"a {number}" for number in numbers), sep="\n", flush=True)
        keys, buffers = batch(numbers)
        kept.append(buffers)
        running[connector.submit_batch_set(keys, [memoryview(each) for each in buffers])] = numbers
        while len(running) >= 4:
            select.select([connector.event_fd()], [], [])
            for future, ok, error, _ in connector.drain_completions():
                if not ok:
                    sys.exit(f"a store failed: {error}")
                print(*(f"s {number}" for number in running.pop(future)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
