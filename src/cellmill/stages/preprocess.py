"""preprocess: cells of one dataset that pass QC, with genes named by Ensembl id, and a report of the dropped ones."""

from pathlib import Path

from cellmill.config.options import PreprocessOptions
from cellmill.data.fasta import open_dataset
from cellmill.data.preprocess import preprocess
from cellmill.data.sequences import preprocess_sequences
from cellmill.files import sha256_file, write_json


def run(
    *,
    options: PreprocessOptions,
    input: Path,
    counts: str,
    dataset: str,
    source: str = "",
    licence: str = "",
    out: Path,
    report: Path,
) -> None:
    """Read the counts or sequences of `input`; write the cells to `out` (.h5ad) and QC figures to `report` (.json)."""
    with open_dataset(input, counts) as reader:
        figures = (preprocess_sequences if reader.ordered else preprocess)(reader, options.preprocess, out)
    origin = {"file": input.name, "sha256": sha256_file(input), "bytes": input.stat().st_size, "counts": counts}
    origin |= {"source": source, "licence": licence}
    write_json(report, {"dataset": dataset, "source": origin, **figures})
    cells, genes = figures["cells"], figures["genes"]
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in cells["dropped"].items() if n)
    print(f"{dataset}: {cells['out']:,} of {cells['in']:,} cells, {genes['out']:,} of {genes['in']:,} genes -> {out}")
    if dropped:
        print(f"{dataset}: cells dropped: {dropped}")
