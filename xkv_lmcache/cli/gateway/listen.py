"""From the hosts of the settings to the addresses to listen on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DUAL_STACK: Final = Path("/proc/sys/net/ipv6/bindv6only")


@dataclass(frozen=True)
class Address:
    """An address with its port; as text `1.2.3.4:5557` or `[::1]:5557`."""

    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.ip.is_loopback

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


def listen_addresses(hosts: Iterable[str], port: int) -> list[Address]:
    """The addresses of `hosts`, each once. Of a name with several, those that this machine has.

    Raises `OSError` for a name that cannot be resolved or has no address here.
    """
    found: dict[Address, None] = {}
    for host in hosts:
        addresses = [Address(ip, port) for ip in _resolve(host)]
        if len(addresses) > 1:
            # `localhost` usually has an IPv6 address, also where IPv6 is off.
            addresses = [address for address in addresses if _is_here(address)]
        if not addresses:
            raise OSError(f"host {host!r} has no address on this machine; name one that it has")
        found.update(dict.fromkeys(addresses))
    if Address(ipaddress.IPv6Address("::"), port) in found and _takes_both():
        found.pop(Address(ipaddress.IPv4Address("0.0.0.0"), port), None)
    return list(found)


def connect_host(hosts: Iterable[str]) -> str:
    """Where a client on this machine reaches a gateway that listens on `hosts`."""
    first = next(iter(hosts))
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(first, first)


def _resolve(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(
            f"host {host!r} cannot be resolved ({error.strerror}); correct the name or write an address"
        ) from None
    return list(dict.fromkeys(ipaddress.ip_address(answer[4][0]) for answer in answers))


def _is_here(address: Address) -> bool:
    family = socket.AF_INET6 if address.ip.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((str(address.ip), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _takes_both() -> bool:
    """Whether a socket on `::` takes IPv4 connections, too."""
    try:
        return _DUAL_STACK.read_text().strip() == "0"
    except OSError:
        return False
