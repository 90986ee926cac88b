"""Who hangs, told from where each rank is."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from cellmill.train.hang_watch import HangWatch, Position, finding


def places(*where: tuple[int, str, int] | None) -> list[Position | None]:
    return [None if at is None else Position(*at, host=f"node{rank // 2}") for rank, at in enumerate(where)]


@pytest.mark.parametrize(
    ("earlier", "now", "line"),
    [
        (
            places((9, "the gradient reduction of step 2", 1), (8, "the cells of step 2", 1)),
            places((9, "the gradient reduction of step 2", 5), (8, "the cells of step 2", 5)),
            "rank 1 on node0 did not come through the gradient reduction of step 2 for 600 s (train.timeout_s) and the "
            "others wait: it is still at the cells of step 2",
        ),
        (
            places((9, "the gradient norm of step 2", 1), (9, "the gradient norm of step 2", 1), (8, "x", 1)),
            places((9, "the gradient norm of step 2", 5), (9, "the gradient norm of step 2", 1), (8, "x", 5)),
            "rank 1 on node0 did not come through the gradient norm of step 2 for 600 s (train.timeout_s) and the "
            "others wait: it does not answer",
        ),
        (
            places((9, "the sum of losses of step 2", 1), (1, "the start", 1), None, (1, "the start", 1)),
            places((9, "the sum of losses of step 2", 5), (1, "the start", 1), None, (1, "the start", 1)),
            "rank 1 on node0 and 2 more (ranks 2, 3) did not come through the sum of losses of step 2 for 600 s "
            "(train.timeout_s) and the others wait: it does not answer",
        ),
        (
            places((9, "the checkpoint of step 2", 1), (9, "the checkpoint of step 2", 1)),
            places((9, "the checkpoint of step 2", 5), (9, "the checkpoint of step 2", 5)),
            "all ranks have been at the checkpoint of step 2 for 600 s (train.timeout_s): no one is behind, look "
            "at the network between them",
        ),
        (
            places((9, "the cells of step 2", 1)),
            places((9, "the cells of step 2", 5)),
            "rank 0 on node0 has been at the cells of step 2 for 600 s (train.timeout_s): where, is in the log",
        ),
    ],
)
def test_the_line_names_who_is_behind(earlier: list[Position | None], now: list[Position | None], line: str) -> None:
    assert finding(earlier, now, 600) == line


def test_who_waits_for_a_checkpoint_waits_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
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
