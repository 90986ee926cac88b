"""The device of a training is decided once, and GPUs that are missing are named before it starts."""

import os

import pytest
import torch.distributed as dist

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.train import staging
from cellmill.train.staging import NodeGpus, agree, decide
from tests.checks import refused


def node(
    number: int, gpus: int, cuda: str | None = "12.8", driver: str | None = "570.1"
) -> NodeGpus:
    return NodeGpus(f"node{number}", gpus, "2.13.0", cuda, driver)


@pytest.mark.parametrize(
    ("wanted", "gpus", "decided"),
    [
        ("cuda", (4, 4), "cuda"),
        ("auto", (4, 8), "cuda"),
        ("auto", (0, 0), "cpu"),
        ("cpu", (0, 4), "cpu"),
    ],
)
def test_all_ranks_have_one_device(wanted: str, gpus: tuple[int, ...], decided: str) -> None:
    assert decide(wanted, [node(number, count) for number, count in enumerate(gpus)], 4) == decided


@pytest.mark.parametrize(
    ("wanted", "nodes", "seen"),
    [
        (
            "cuda",
            [node(0, 4), node(1, 0, cuda=None)],
            "0 GPUs (torch 2.13.0 built without CUDA, driver 570.1)",
        ),
        (
            "auto",
            [node(0, 4), node(1, 3), node(2, 0, driver=None)],
            "3 GPUs (torch 2.13.0 for CUDA 12.8, driver 570.1), and 1 more nodes like it (node2)",
        ),
    ],
)
def test_missing_gpus_are_named_with_their_node(
    wanted: str, nodes: list[NodeGpus], seen: str
) -> None:
    line = (
        f"expected 4 GPUs per node, one per process, but node1 shows {seen}; correct gpus_per_node, nproc_per_node or "
        "the node's torch and driver, or set device: cpu in the profile (set-resources: train) to train on CPU cores"
    )
    with refused(line, UserError):
        decide(wanted, nodes, 4)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as rank 0 of two on one node with a GPU."""
    places = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    for name, value in places.items():
        monkeypatch.setenv(name, value)


def test_the_first_rank_decides_the_device(rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(staging.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as of_first:
        agree("cuda", store)
    monkeypatch.setattr(staging.torch.cuda, "is_available", lambda: True)  # on this node alone
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    with refused(str(of_first.value), UserError):
        agree("cuda", store)


def test_device_cpu_hides_the_gpus_of_a_node(rank: None) -> None:
    assert agree("cpu", dist.HashStore()).type == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_requested_gpus_are_used_unless_the_profile_says_cpu() -> None:
    assert Machine(gpus_per_node="h100:4").wanted_device == "cuda"
    assert Machine(gres="gpu:2", device="cpu").wanted_device == "cpu"
    assert (Machine().wanted_device, Machine(device="cuda").wanted_device) == ("auto", "cuda")
