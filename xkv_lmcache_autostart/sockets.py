"""Listening sockets: who owns a port, from /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

_LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    address: IPv4Address | IPv6Address
    port: int
    inode: str


def listeners(host: str, port: int) -> list[Listener]:
    """The listening sockets that a client of `host`:`port` could reach by IPv4, which is what LMCache has.

    Raises `OSError` where /proc does not show sockets, or `host` does not resolve.
    """
    wanted = {ip_address(str(info[4][0])) for info in socket.getaddrinfo(host, port, socket.AF_INET)}
    return [
        listener
        for listener in _listening()
        if listener.port == port and any(_overlap(listener.address, address) for address in wanted)
    ]


def owned_inodes(pid: int) -> set[str]:
    """The inodes of the sockets that process `pid` itself has open.

    Raises `OSError` where /proc does not show them (another user's process), or the process is gone.
    """
    inodes = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def holder(listener: Listener) -> str:
    """The process that has `listener` open, in words, as far as /proc shows it."""
    for process in psutil.process_iter():
        try:
            if listener.inode in owned_inodes(process.pid):
                return f"process {process.pid} ({' '.join(process.cmdline()[:3]) or process.name()})"
        except (OSError, psutil.Error):
            continue
    return "a process that /proc does not show (of another user or container)"


def _listening() -> Iterator[Listener]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}") as table:
                rows = table.read().splitlines()[1:]
        except FileNotFoundError:
            if name == "tcp":
                raise
            continue  # a kernel without IPv6
        for row in rows:
            fields = row.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                yield Listener(_address(address), int(port, 16), fields[9])


def _address(text: str) -> IPv4Address | IPv6Address:
    """An address as /proc/net/tcp prints it: 32-bit words in the machine's byte order."""
    words = bytes.fromhex(text)
    swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    if len(swapped) == 4:
        return IPv4Address(swapped)
    address = IPv6Address(swapped)
    return address.ipv4_mapped or address


def _overlap(listening: IPv4Address | IPv6Address, wanted: IPv4Address | IPv6Address) -> bool:
    return listening == wanted or listening.is_unspecified or wanted.is_unspecified
