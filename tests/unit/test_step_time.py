"""Duration of a collective: bytes over links, and hops."""

from __future__ import annotations

import pytest

from cellmill.planner.communication import Kind, Traffic
from cellmill.planner.cost import NETWORK_FRAC, Network, latency


@pytest.mark.parametrize(
    ("kind", "processes", "in_a_node", "microseconds"),
    [
        ("all-gather", 8, 8, 14 + 7 * 1.9),
        ("reduce-scatter", 16, 8, 14 + 14 * 1.9 + 4),
        ("all-gather", 1024, 8, 14 + 896 * 1.9 + 127 * 4),
        ("all-reduce", 2, 1, 14 + 2 * 4),  # a ring
        ("all-reduce", 128, 1, 14 + 2 * 7 * 8.5),  # a tree
        ("point to point", 4, 1, 14),
    ],
)
def test_latency_counts_each_hop(kind: Kind, processes: int, in_a_node: int, microseconds: float) -> None:
    traffic = Traffic(kind, "dp_shard", processes, in_a_node, payload_bytes=0, calls=1)
    assert latency(traffic) == pytest.approx(1e-6 * microseconds)


def test_bytes_and_hops_add_up_over_the_slower_link() -> None:
    network = Network(intra_node_gbs=100, inter_node_gbs=10)
    traffic = Traffic("all-gather", "dp_shard", 16, 8, payload_bytes=1.6e9, calls=10)
    # 1.5 GB are sent; an eighth of them, over this process's share of the network, takes longer than the rest
    assert network.seconds(traffic) == pytest.approx(1.5 / 8 / 10 / NETWORK_FRAC + 10 * latency(traffic))
