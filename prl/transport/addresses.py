"""Addresses of this host: imports neither torch nor a web server, which take seconds."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from prl.config.loopback import LOOPBACK_HOSTS


def address_towards(urls: Sequence[str], own: str) -> str:
    """The address of this host at which those who listen at `urls` reach it; `own` where nobody is elsewhere, or where
    it is no loopback itself.
    """
    others = [parts for url in urls if (parts := urlsplit(url)).hostname not in LOOPBACK_HOSTS]
    if not others or own not in LOOPBACK_HOSTS:
        return own
    host, port = others[0].hostname or "", others[0].port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: it asks which way a packet would go
        return str(probe.getsockname()[0])


def family_of(address: str) -> socket.AddressFamily:
    """Of a name or number of this host. Raises OSError for one that does not resolve."""
    families = [found[0] for found in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    return socket.AF_INET if socket.AF_INET in families else families[0]  # names that have both meant IPv4 always
