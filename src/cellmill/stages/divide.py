"""divide: the plan of a corpus's shards, for jobs that write a part of them each (`shard.jobs`)."""

from pathlib import Path

from cellmill.config.options import ShardOptions
from cellmill.data.shard_plan import make_plan
from cellmill.data.vocabulary import Vocabulary


def run(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Give every cell of `cells` a split, a shard and a place; write the plan to the folder of `out` (plan.json).

    The manifest beside that folder is removed.
    """
    plan = make_plan(cells, Vocabulary.read(vocabulary), options.shard, out.parent.with_name("manifest.json"))
    cells_of = ", ".join(f"{n:,} {name}" for name, n in plan.n_obs.items())
    print(f"cells: {cells_of} in {len(plan.shards()):,} shards -> {out}")
