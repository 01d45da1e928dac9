"""What LMCache relies on: nothing raises, nothing blocks, every answer has its form, whatever it is called with."""

import os
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends import Backend
from xkv_lmcache import XkvL2Connector, probe_store

from .client import Buffer, Client, contents, stats_file


@pytest.fixture(params=["embedded uring", "embedded pool", "gateway auto", "sharing auto"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    kind, engine = request.param.split()
    backend = Backend("gateway" if kind == "sharing" else kind, sharing=kind == "sharing")
    try:
        with Client(**backend.params(tmp_path / "store", store_gb=2, io_engine=engine)) as client:
            yield client
    finally:
        backend.close()


SIZES = [1, 63, 4095, 4096, 4097, 131071, 131072, 131073, 1 << 20, 14 << 20, (64 << 20) + 3]


def test_every_size_comes_back_in_a_mixed_batch(client: Client) -> None:
    objects = {f"object of {size}": contents(size, size) for size in SIZES}
    assert client.set(objects)
    assert client.exists([*objects, "absent"]) == [True] * len(SIZES) + [False]
    assert client.get({key: len(data) for key, data in objects.items()}) == objects


def test_a_buffer_of_another_size_is_a_miss(client: Client) -> None:
    for wrong in (1, 4999, 5001, 200_000):
        assert client.set({"a": contents(1, 5000)})
        assert client.get({"a": wrong}) == {"a": None}
        assert client.exists(["a"]) == [False]


def test_ten_thousand_keys_in_one_batch(client: Client) -> None:
    objects = {f"model@01000100@0@{i:064x}": contents(i, 1 + i % 6000) for i in range(10_000)}
    assert client.set(objects)
    assert client.exists(list(objects)) == [True] * len(objects)
    assert client.get({key: len(data) for key, data in objects.items()}) == objects
    assert client.delete(list(objects)) == [True] * len(objects)
    assert client.exists(list(objects)) == [False] * len(objects)


MODELS = [
    "org/model",
    "/local/../path",
    "a b",
    "..",
    "m" * 300,
    "😀",
    "lone \ud800 surrogate",
    "-SEP-",
    "a\0b",
    "",
]


def test_odd_models_and_salts_are_told_apart(client: Client) -> None:
    hashes = ["0" * 16, "0" * 64, "0" * 63 + "1"]
    salts = ["", "@tenant", "@" + "é" * 128, "@\udfff"]
    keys = [f"{model}@01000100@0@{each}{salt}" for model in MODELS for each in hashes for salt in salts]
    objects = {key: contents(i, 100 + i) for i, key in enumerate(keys)}
    assert len(objects) == len(keys)
    assert client.set(objects)
    assert client.get({key: len(data) for key, data in objects.items()}) == objects


def test_duplicates_restores_and_empty_batches(client: Client) -> None:
    data = Buffer(contents(1, 5000))
    future = client.connector.submit_batch_set(["a", "b", "a"], [data.view] * 3)
    assert client.answer(future)[1]
    assert client.set({"a": contents(2, 5000)}), "present is fine"
    assert client.get({"a": 5000, "b": 5000}) == {"a": data.content(), "b": data.content()}
    buffers = [Buffer.blank(5000), Buffer.blank(5000)]
    future = client.connector.submit_batch_get(["a", "a"], [buffer.view for buffer in buffers])
    assert client.bools(future) == [True, True]
    assert [buffer.content() for buffer in buffers] == [data.content()] * 2
    assert client.set({}) and client.get({}) == {}
    assert client.exists([]) == [] and client.delete([]) == []
    stats = client.connector.stats()
    assert (stats["store_stored"], stats["store_deduped"], stats["store_skipped"]) == (2, 1, 1)


class Hostile:
    """Raises from everything that can be asked of it."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no items")


BAD: list[tuple[Any, Any]] = [
    (None, None),
    (5, 5),
    (["a"], None),
    ([1], [memoryview(bytearray(10))]),
    (["a"], [None]),
    (["a"], ["no buffer"]),
    (["a", "b"], [memoryview(bytearray(10))]),
    (["a"], [memoryview(bytearray(10))] * 2),
    (["a"], [memoryview(bytearray(20))[::2]]),
    (Hostile(), Hostile()),
    (["a"], Hostile()),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_no_argument_makes_a_submit_raise(client: Client, number: int) -> None:
    keys, views = BAD[number]
    length = len(keys) if isinstance(keys, list) else 0
    connector: Any = client.connector
    assert not client.answer(connector.submit_batch_set(keys, views))[1]
    assert client.bools(connector.submit_batch_get(keys, views)) == [False] * length
    if not isinstance(keys, list) or keys == [1]:
        for submit in (connector.submit_batch_exists, connector.submit_batch_delete):
            _, ok, error, bools = client.answer(submit(keys))
            assert (ok, bools) == (False, [False] * length) and error
    assert client.set({"still": b"works"})


def test_a_read_only_buffer_fails_its_own_key(client: Client) -> None:
    assert client.set({"a": b"12345", "b": b"67890"}), "a store only reads"
    good = Buffer.blank(5)
    future = client.connector.submit_batch_get(["a", "b"], [memoryview(bytes(5)), good.view])
    assert client.bools(future) == [False, True]
    assert good.content() == b"67890"


def test_buffers_of_other_element_types_are_bytes_all_the_same(client: Client) -> None:
    import array

    numbers = array.array("d", range(1000))
    assert client.answer(client.connector.submit_batch_set(["a"], [memoryview(numbers)]))[1]
    assert client.get({"a": 8000}) == {"a": numbers.tobytes()}


def test_the_descriptor_is_readable_only_while_something_can_be_drained(client: Client) -> None:
    fd = client.connector.event_fd()
    assert isinstance(fd, int) and fd == client.connector.event_fd()
    assert not os.get_blocking(fd) and not os.get_inheritable(fd)
    assert select.select([fd], [], [], 0)[0] == []
    client.connector.submit_batch_exists(["a"])
    client.connector.submit_batch_exists(["a"])
    drained = 0
    while drained < 2:
        assert select.select([fd], [], [], 10)[0] == [fd]
        now = len(client.connector.drain_completions())
        assert now > 0, "readable, but nothing to drain"
        drained += now
    assert select.select([fd], [], [], 0)[0] == []
    assert client.connector.drain_completions() == []


def test_ids_increase_over_all_operations(client: Client) -> None:
    view = Buffer.blank(10).view
    connector = client.connector
    ids = [
        connector.submit_batch_set(["a"], [view]),
        connector.submit_batch_get(["a"], [view]),
        connector.submit_batch_exists([]),
        connector.submit_batch_delete(["a"]),
        connector.submit_batch_exists(["a"]),
    ]
    assert ids == sorted(set(ids))
    for future in ids:
        client.answer(future)


def test_views_are_held_until_the_answer_is_drained_and_not_longer(client: Client) -> None:
    backing = bytearray(contents(1, 5000))
    future = client.connector.submit_batch_set(["a"], [memoryview(backing)])
    client.answer(future)
    backing.clear()  # BufferError while somebody exports it


def test_submits_from_many_threads_while_another_drains(client: Client) -> None:
    threads, rounds = 4, 200
    submitted: list[list[int]] = [[] for _ in range(threads)]

    def submit(number: int) -> None:
        for i in range(rounds):
            data = Buffer(contents(i, 3000))
            submitted[number].append(client.connector.submit_batch_set([f"{number} {i}"], [data.view]))
            submitted[number].append(client.connector.submit_batch_exists([f"{number} {i}"]))

    running = [threading.Thread(target=submit, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    futures = [future for each in submitted for future in each]
    assert len(set(futures)) == 2 * threads * rounds
    for future in futures:
        assert client.answer(future)[1]


def test_several_connectors_in_one_process(backend: Backend, tmp_path: Path) -> None:
    with (
        Client(**backend.params(tmp_path / "1", store_gb=0.1)) as one,
        Client(**backend.params(tmp_path / "2", store_gb=0.1)) as two,
    ):
        assert one.set({"a": b"one"}) and two.set({"a": b"two"})
        assert (one.get({"a": 3}), two.get({"a": 3})) == ({"a": b"one"}, {"a": b"two"})
        assert one.connector.event_fd() != two.connector.event_fd()


def test_close_is_final_idempotent_and_fast(backend: Backend, tmp_path: Path) -> None:
    client = Client(**backend.params(tmp_path, store_gb=0.1))
    assert client.set({"a": b"12345"})
    started = time.monotonic()
    client.connector.close()
    client.connector.close()
    assert time.monotonic() - started < 5
    assert client.exists(["a"]) == [False]
    assert client.get({"a": 5}) == {"a": None}
    assert not client.set({"b": b"12345"})
    assert client.delete(["a"]) == [False]
    with Client(**backend.params(tmp_path)) as again:
        assert again.get({"a": 5}) == {"a": b"12345"}


def test_a_dropped_connector_frees_its_store(backend: Backend, tmp_path: Path) -> None:
    Client(**backend.params(tmp_path, store_gb=0.1)).set({"a": b"12345"})
    backend.release(tmp_path)
    with Client(**backend.params(tmp_path)) as again:
        assert again.exists(["a"]) == [True]


def test_namespaces_do_not_meet(backend: Backend, tmp_path: Path) -> None:
    with Client(**backend.params(tmp_path, store_gb=0.1, namespace="bf16")) as client:
        assert client.set({"a": b"12345"})
    with Client(**backend.params(tmp_path, namespace="fp8")) as client:
        assert client.exists(["a"]) == [False]
        assert client.set({"a": b"67890"})
    with Client(**backend.params(tmp_path, namespace="bf16")) as client:
        assert client.get({"a": 5}) == {"a": b"12345"}


def test_statistics_are_written_whole_and_at_close(backend: Backend, tmp_path: Path) -> None:
    (folder := tmp_path / "statistics").mkdir()
    path = folder / "stats.json"
    with Client(**backend.params(tmp_path / "store", store_gb=0.1, stats_path=str(path))) as client:
        assert client.set({"a": b"12345"})
        assert client.get({"a": 5, "b": 5}) == {"a": b"12345", "b": None}
    counted = stats_file(path)
    assert counted["store_stored"] == 1 and counted["load_miss_absent"] == 1
    get = counted["operations"]["get"]
    assert (get["tasks"], get["keys"], get["hits"], get["bytes"]) == (1, 2, 1, 5)
    assert [each.name for each in folder.iterdir()] == ["stats.json"]
    for outcome in ("skipped", "deduped", "dropped", "poisoned", "rejected_by_card"):
        assert counted[f"store_{outcome}"] == 0


def test_statistics_appear_while_running(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    with Client(store=str(tmp_path / "store"), store_gb=0.1, stats_path=str(path), stats_interval_s=0.05):
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline
        assert stats_file(path)["store"]["objects"] == 0


def test_the_log_has_a_line_of_statistics_each_interval(tmp_path: Path) -> None:
    program = (
        "import sys; from xkv_lmcache import XkvL2Connector\n"
        f"c = XkvL2Connector(store={str(tmp_path)!r}, store_gb=0.1, stats_interval_s=0.05)\n"
        "sys.stdin.read(); c.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdin is not None
        said: list[str] = []
        while sum("loads 0/0 hit" in line for line in said) < 3:
            line = process.stderr.readline()
            assert line.startswith("[xkv-lmcache] 20"), said
            said.append(line)
        process.stdin.close()
        assert "closed" in process.stderr.read()
    assert process.returncode == 0
    assert any(str(tmp_path) in line for line in said), "what was opened"
    assert any("WARN namespace is empty" in line for line in said)


def test_repeated_failures_are_counted_instead_of_repeated(tmp_path: Path) -> None:
    program = (
        "from xkv_lmcache import XkvL2Connector\n"
        f"c = XkvL2Connector(store={str(tmp_path)!r}, store_gb=0.1)\n"
        "[c.submit_batch_set(['a'], [5]) for _ in range(1000)]; c.close()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    failures = [line for line in ran.stderr.splitlines() if "empty or in pieces" in line]
    assert len(failures) == 1 and "WARN" in failures[0]
    assert "store_failed: 999 more" in ran.stderr


def test_fifty_connectors_leave_nothing_behind(backend: Backend, tmp_path: Path) -> None:
    def taken() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count() + len(os.listdir("/proc/self/task"))

    before = None
    for i in range(50):
        with Client(**backend.params(tmp_path, store_gb=0.1, batch_slots=16)) as client:
            assert client.set({str(i): contents(i, 300_000)})
            assert client.get({str(i): 300_000}) == {str(i): contents(i, 300_000)}
        del client
        before = before or taken()
    deadline = time.monotonic() + 10
    while any(now > then for now, then in zip(taken(), before or (), strict=True)):
        assert time.monotonic() < deadline, f"{before} became {taken()}"


def test_the_constructor_says_what_is_wrong_and_takes_nothing_with_it(tmp_path: Path) -> None:
    (foreign := tmp_path / "foreign.img").write_bytes(contents(1, 64 << 20))
    before = foreign.read_bytes()
    with pytest.raises(ValueError, match=r"foreign\.img"):
        XkvL2Connector(store=str(foreign))
    assert foreign.read_bytes() == before, "a foreign file is left alone"
    with pytest.raises(ValueError, match="batch_slot.*did you mean batch_slots"):
        XkvL2Connector(store=str(tmp_path), batch_slot=5)
    with pytest.raises(ValueError, match="chooses a gateway, but store="):
        XkvL2Connector(store=str(tmp_path), host="127.0.0.1")
    with pytest.raises((ValueError, OSError), match="/proc/nowhere"):
        XkvL2Connector(store="/proc/nowhere/store")
    store = tmp_path / "store"
    with Client(store=str(store), store_gb=0.1, fragment_bytes=65536) as client:
        assert client.set({"a": b"12345"})
        with pytest.raises(OSError, match=str(store)):
            probe_store([str(store)])
    with pytest.raises(ValueError, match="fragment_bytes"):
        XkvL2Connector(store=str(store), fragment_bytes=131072)
    with pytest.raises(ValueError, match="fragment_bytes"):
        probe_store([str(store)], None, 131072)
    probe_store([str(store)], 0.1, 65536)
    with Client(store=str(store)) as client:
        assert client.get({"a": 5}) == {"a": b"12345"}


def test_a_store_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with Client(store=str(tmp_path), store_gb=0.1), pytest.raises(OSError, match=str(tmp_path)):
        XkvL2Connector(store=str(tmp_path))


def test_a_probe_changes_nothing(tmp_path: Path) -> None:
    probe_store([str(tmp_path / "new")], 1.0, None)
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        (locked := tmp_path / "locked").mkdir()
        locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
        path = str(locked / "store")
    else:
        path = "/sys/kernel/store"  # root may write anywhere else
    with pytest.raises((OSError, ValueError), match=path):
        XkvL2Connector(store=path)
