"""The relay of a child's output."""

from __future__ import annotations

import os
from collections import deque

from xkv_lmcache_autostart.output import Relay, write_patiently


def drained(chunks: list[bytes]) -> tuple[bytes, list[str]]:
    """What arrives at the other end, and the tail, when a child writes `chunks` and closes."""
    source, child = os.pipe()
    reader, target = os.pipe()
    tail: deque[str] = deque(maxlen=3)
    relay = Relay(source, target, tail)
    for chunk in chunks:
        os.write(child, chunk)
        relay.read()
    os.close(child)
    relay.read()
    assert not relay.open
    arrived = b""
    while relay.wants_write():
        relay.write()
        arrived += os.read(reader, 65536)
    for descriptor in (reader, target):
        os.close(descriptor)
    return arrived, list(tail)


def test_lines_are_passed_on_whole() -> None:
    source, child = os.pipe()
    reader, target = os.pipe()
    relay = Relay(source, target, deque())
    os.write(child, b"one\ntw")
    relay.read()
    relay.write()
    assert os.read(reader, 100) == b"one\n"
    assert not relay.wants_write(), "half a line waits for its end"
    os.write(child, b"o\n")
    relay.read()
    relay.write()
    assert os.read(reader, 100) == b"two\n"
    relay.close()
    for descriptor in (child, reader, target):
        os.close(descriptor)


def test_nothing_is_lost_or_changed() -> None:
    text = b"".join(b"line %d %s\n" % (number, b"x" * (number % 300)) for number in range(300))
    assert drained([text[at : at + 1000] for at in range(0, len(text), 1000)])[0] == text


def test_the_last_line_may_lack_its_end() -> None:
    assert drained([b"a\nb"]) == (b"a\nb\n", ["a", "b"])


def test_the_tail_has_the_last_lines_without_colours() -> None:
    arrived, tail = drained([b"1\n2\n\n3\n", b"\x1b[32;20mgreen\x1b[0m\n", "é\n".encode(), b"\xff\n"])
    assert tail == ["green", "é", "\ufffd"]
    assert b"\x1b[32;20mgreen" in arrived


def test_a_reader_that_is_gone_does_not_stop_the_child() -> None:
    source, child = os.pipe()
    reader, target = os.pipe()
    os.close(reader)
    tail: deque[str] = deque()
    relay = Relay(source, target, tail)
    for line in (b"a\n", b"b\n"):
        os.write(child, line)
        relay.read()
        relay.write()
    assert list(tail) == ["a", "b"]
    assert not relay.wants_write()
    relay.close()
    for descriptor in (child, target):
        os.close(descriptor)


def test_writing_patiently_gives_up_on_a_full_pipe() -> None:
    reader, target = os.pipe()
    assert write_patiently(target, b"x" * 65536, 1.0)
    assert not write_patiently(target, b"y", 0.0)
    os.read(reader, 65536)
    assert write_patiently(target, b"y", 0.0)
    os.close(reader)
    assert not write_patiently(target, b"y", 0.0)
    os.close(target)
