"""shard_part: a part of the shards of a corpus, by the plan of `divide`."""

import re
from pathlib import Path

from cellmill.config.options import ShardOptions
from cellmill.data.shard_plan import find_plan
from cellmill.data.shard_writer import write_part
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError
from cellmill.files import write_json


def run(*, options: ShardOptions, cells: list[Path], vocabulary: Path, part: str, out: Path) -> None:
    """Write the shards of `part` (as `3-of-8`) above the plan's folder, that of `out`, then `out` itself.

    Shards that a killed process finished are kept.
    """
    named = re.fullmatch(r"([0-9]+)-of-([0-9]+)", part)
    if named is None or not 1 <= int(named[1]) <= int(named[2]):
        raise ConfigError(f"--part: expected a part such as 3-of-8, got {part!r}")
    number, parts = int(named[1]), int(named[2])
    known = Vocabulary.read(vocabulary)
    plan = find_plan(cells, known, options.shard, out.parent)
    written = write_part(plan, cells, known, out.parent.parent, number - 1, parts)
    write_json(out, {"plan": plan.key, "shards": written})
    print(f"{written:,} of {len(plan.shards()):,} shards -> {out.parent.parent}")
