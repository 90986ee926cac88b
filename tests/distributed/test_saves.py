"""A checkpoint holds the state of its own step, also when training continues while it is written."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import cases
from tests.distributed.conftest import options


def test_a_later_save_into_the_same_memory_holds_its_own_step(alone: None, corpus: str, tmp_path: Path) -> None:
    opts = options(train={"checkpoint_every_steps": 2, "keep_checkpoints": 9})
    whole = cases.curve(corpus, opts, str(tmp_path / "run"), steps=8)
    for step in (2, 4, 6):
        folder = tmp_path / f"from-{step}"
        (folder / "checkpoints").mkdir(parents=True)
        name = f"step-{step:08}"
        (folder / "checkpoints" / name).symlink_to(tmp_path / "run" / "checkpoints" / name)
        assert cases.curve(corpus, opts, str(folder), steps=8, load=True) == whole[step:]
