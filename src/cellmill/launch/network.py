"""Network interfaces of a node: those that the profile names, and the one of a route."""

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress

import psutil


def matching_interfaces(wanted: str, available: Sequence[str]) -> list[str]:
    """Interfaces of a node that the profile's `interface` names.

    `wanted` lists names or prefixes, of which a node may lack some; after `=` names only, after `^`
    prefixes to leave out. A name counts before a prefix: bond0 is not bond0.2973.
    """
    words = [*filter(None, wanted.lstrip("=^").split(","))]
    if wanted.startswith("^"):
        return [name for name in available if not name.startswith(("lo", *words))]
    matches = []
    for word in words:
        if word in available:
            matches.append(word)
        elif not wanted.startswith("="):
            matches += [name for name in available if name.startswith(word)]
    return matches


def network_variables(wanted: str, available: Sequence[str], peer: str) -> dict[str, str]:
    """Variables that make gloo and NCCL use the profile's interface.

    NCCL takes a name as a prefix unless it begins with `=`. gloo knows only names and gets one: of
    several, that of the route to `peer`.
    """
    matches = matching_interfaces(wanted, available)
    if not matches:
        return {}
    routed = routed_interface(peer)
    return {
        "GLOO_SOCKET_IFNAME": routed if routed in matches else matches[0],
        "NCCL_SOCKET_IFNAME": wanted if wanted.startswith("^") else f"={','.join(matches)}",
    }


def routed_interface(host: str) -> str | None:
    """Interface of the route to a host, or of the route out; None if there is no route."""
    # the second is of a documentation network: nothing is sent, only the route is looked up
    for target in (host, "192.0.2.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = probe.getsockname()[0]
            if ipaddress.ip_address(address).is_loopback:
                continue
            for name, entries in psutil.net_if_addrs().items():
                if address in [entry.address for entry in entries]:
                    return name
    return None
