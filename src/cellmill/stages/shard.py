"""shard: shards of a corpus, split, preshuffled and in rank order, and their manifest."""

from pathlib import Path

from cellmill.config.options import ShardOptions
from cellmill.data.manifest import Manifest
from cellmill.data.shard_writer import write_shards
from cellmill.data.vocabulary import Vocabulary


def run(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Write shards of `cells` over the genes of `vocabulary` beside `out`, then the manifest to `out`.

    Shards that a killed process or the jobs of `shard_part` finished are kept.
    """
    manifest = write_shards(cells, Vocabulary.read(vocabulary), options.shard, out)
    sizes = ", ".join(f"{entry.n_obs:,} {name}" for name, entry in manifest.splits.items())
    left_out = sum(manifest.left_out.values())
    note = f"; {left_out:,} dropped: no gene in the vocabulary" if left_out else ""
    print(f"cells: {sizes}{note} -> {out}")
    for line in _duplicates(manifest, options.shard.duplicates):
        print(line)


def _duplicates(manifest: Manifest, option: str) -> list[str]:
    """Lines about cells with the same counts of the same genes."""
    if not manifest.duplicates:
        return []
    where = ", ".join(f"{name}: {n:,}" for name, n in manifest.duplicates.items())
    done = "dropped" if option == "drop" else "kept; shard.duplicates: drop leaves them out"
    lines = [f"{sum(manifest.duplicates.values()):,} cells are equal to an earlier one ({where}): {done}"]
    if manifest.across_splits:
        lines.append(f"{manifest.across_splits:,} cells have an equal one in another split: they are not held out")
    return lines
