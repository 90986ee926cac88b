"""shard: shards of a corpus, split, preshuffled and in rank order, and their manifest."""

from pathlib import Path

from cellmill.config.options import ShardOptions
from cellmill.data.shard_writer import write_shards
from cellmill.data.vocabulary import Vocabulary


def run(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Write shards of `cells` over the genes of `vocabulary` beside `out`, then the manifest to `out`."""
    manifest = write_shards(cells, Vocabulary.read(vocabulary), options.shard, out)
    sizes = ", ".join(f"{entry.n_obs:,} {name}" for name, entry in manifest.splits.items())
    left_out = sum(manifest.left_out.values())
    note = f"; {left_out:,} dropped: no gene in the vocabulary" if left_out else ""
    print(f"cells: {sizes}{note} -> {out}")
