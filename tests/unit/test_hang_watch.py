"""The hung rank is found from the positions of all ranks."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from cellmill.train.hang_watch import HangWatch, Position, hang_line


def positions(*where: tuple[int, str, int] | None) -> list[Position | None]:
    return [None if at is None else Position(*at, host=f"node{rank // 2}") for rank, at in enumerate(where)]


GRADIENTS, LOADING, NORM = "the gradient reduction of step 2", "data loading of step 2", "the gradient norm of step 2"


@pytest.mark.parametrize(
    ("earlier", "now", "line"),
    [
        (
            positions((9, GRADIENTS, 1), (8, LOADING, 1)),
            positions((9, GRADIENTS, 5), (8, LOADING, 5)),
            "rank 1 on node0 is stuck at data loading of step 2; the other ranks have waited 600 s (train.timeout_s) "
            "at the gradient reduction of step 2",
        ),
        (
            positions((9, NORM, 1), (9, NORM, 1), (8, "x", 1)),
            positions((9, NORM, 5), (9, NORM, 1), (8, "x", 5)),
            "rank 1 on node0 does not respond; the other ranks have waited 600 s (train.timeout_s) at the gradient "
            "norm of step 2",
        ),
        (
            positions((9, "the sum of losses of step 2", 1), (1, "the start", 1), None, (1, "the start", 1)),
            positions((9, "the sum of losses of step 2", 5), (1, "the start", 1), None, (1, "the start", 1)),
            "rank 1 on node0 and 2 more (ranks 2, 3) do not respond; the other ranks have waited 600 s "
            "(train.timeout_s) at the sum of losses of step 2",
        ),
        (
            positions((9, "the checkpoint of step 2", 1), (9, "the checkpoint of step 2", 1)),
            positions((9, "the checkpoint of step 2", 5), (9, "the checkpoint of step 2", 5)),
            "all ranks have waited 600 s (train.timeout_s) at the checkpoint of step 2 and none is behind: check the "
            "network between them",
        ),
        (
            positions((9, LOADING, 1)),
            positions((9, LOADING, 5)),
            "rank 0 on node0 has been stuck at data loading of step 2 for 600 s (train.timeout_s); its stack is in "
            "the log",
        ),
    ],
)
def test_the_line_names_the_rank_behind(earlier: list[Position | None], now: list[Position | None], line: str) -> None:
    assert hang_line(earlier, now, 600) == line


def test_waiting_for_a_checkpoint_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    store, watch, ended = dist.HashStore(), HangWatch(), threading.Event()
    watch.warm = True

    def other(saving: bool) -> None:
        store.set("1", json.dumps(asdict(Position(5, "the checkpoint of step 2", 1, "node1", saving))))

    other(saving=True)
    thread = threading.Thread(target=watch._run, args=(store, 0.1, lambda line: ended.set()), daemon=True)
    thread.start()
    time.sleep(1)
    assert not ended.is_set()
    other(saving=False)
    assert ended.wait(5)
    thread.join()
