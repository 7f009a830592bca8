"""Hosts of endpoints: which addresses they name, and the brackets around IPv6 addresses."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address

_WILDCARDS = ("*", "0.0.0.0", "::")


def is_ipv6(endpoint: str) -> bool:
    """Return whether the socket needs the option IPV6."""
    return endpoint.startswith("tcp://") and ("[" in endpoint or "::" in endpoint)


def host_of(endpoint: str) -> str:
    """Return the host of a ``tcp://`` endpoint, IPv6 without brackets; an empty string for other endpoints."""
    if not endpoint.startswith("tcp://"):
        return ""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(endpoint: str) -> bool:
    """Return whether only programs of this machine reach a bound endpoint."""
    if not endpoint.startswith("tcp://"):
        return True
    host = host_of(endpoint)
    try:
        address = ip_address(host)
    except ValueError:  # a name or a wildcard
        return host == "localhost"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def own_address() -> str:
    """Return the source address of this host's packets to other hosts, else the loopback address."""
    # Connecting a datagram socket sends nothing; these are addresses for documentation (RFC 5737, RFC 3849).
    for family, there in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((there, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def is_own_address(host: str) -> bool:
    """Return whether an IP address, or ``localhost``, belongs to this host; other names are not resolved."""
    if host == "localhost":
        host = "127.0.0.1"
    try:
        family = socket.AF_INET
        if ip_address(host).version == 6:
            family = socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # fails for addresses of other hosts
            return True
    except (OSError, ValueError):
        return False


def connectable(endpoint: str) -> str:
    """Return a bound endpoint with a wildcard host replaced by this host's own address."""
    if host_of(endpoint) not in _WILDCARDS:
        return endpoint
    return f"tcp://{bracketed(own_address())}:{endpoint.rpartition(':')[2]}"


def bracketed(host: str) -> str:
    """Return a host for use before a port: an IPv6 address in brackets."""
    if ":" in host and not host.startswith("["):
        return f"[{host}]"
    return host


def check_ip(address: object) -> str | None:
    """Return an address for readers to connect to, or None, after checking it."""
    if address is None:
        return None
    if not isinstance(address, str):
        raise TypeError(f"connect_ip must be a string or None, not {address!r}")
    bare = address.strip("[]")
    if bare != "*":
        try:
            ip_address(bare)
        except ValueError:
            raise ValueError(f"connect_ip must be an IP address of this host, not {address!r}") from None
    return bare
