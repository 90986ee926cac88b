"""shard: the cells of a corpus, split, preshuffled and in rank order, and the manifest that binds them."""

from __future__ import annotations

from pathlib import Path

from cellmill.config.options import ShardOptions
from cellmill.data.shard_writer import write_shards
from cellmill.data.vocabulary import Vocabulary


def run(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Writes shards of `cells` over the genes of `vocabulary` beside `out`, the manifest, which comes last."""
    manifest = write_shards(cells, Vocabulary.read(vocabulary), options.shard, out)
    sizes = ", ".join(f"{entry.n_obs:,} {name}" for name, entry in manifest.splits.items())
    left_out = sum(manifest.left_out.values())
    note = f"; {left_out:,} left out, they have no gene of the vocabulary" if left_out else ""
    print(f"cells: {sizes}{note} -> {out}")
