"""preprocess: cells of one dataset that pass QC, with genes named by Ensembl id, and a report of the dropped ones."""

from pathlib import Path

from cellmill.config.corpus import NO_COLUMNS, ObsColumns
from cellmill.config.options import PreprocessOptions
from cellmill.data.dataset_file import local_input, open_dataset, origin_of
from cellmill.data.genes import lost_counts
from cellmill.data.mapped_labels import sentence
from cellmill.data.preprocess import preprocess
from cellmill.data.sequences import preprocess_sequences
from cellmill.files import remove_incomplete, write_json


def run(
    *,
    options: PreprocessOptions,
    input: Path | str,
    counts: str,
    dataset: str,
    columns: ObsColumns = NO_COLUMNS,
    round_counts: bool = False,
    source: str = "",
    licence: str = "",
    out: Path,
    report: Path,
) -> None:
    """Read counts or sequences of `input`, a path or URL; write the cells to `out` (.h5ad), QC to `report` (.json).

    `columns` are the dataset's filter, labels and roles: obs columns, which are checked before counts are read.
    """
    remove_incomplete(out)
    path = local_input(input)
    with open_dataset(path, counts) as reader:
        reader.round_counts = round_counts
        figures = (preprocess_sequences if reader.ordered else preprocess)(reader, options.preprocess, out, columns)
        reader.warn_if_rounded()
    origin = origin_of(path) | {"counts": counts, "source": source, "licence": licence}
    origin |= {"round_counts": True} if round_counts else {}
    origin |= {"columns": given} if (given := columns.model_dump(exclude_none=True)) else {}
    write_json(report, {"dataset": dataset, "source": origin, **figures})
    cells, genes = figures["cells"], figures["genes"]
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in cells["dropped"].items() if n)
    print(f"{dataset}: {cells['out']:,} of {cells['in']:,} cells, {genes['out']:,} of {genes['in']:,} genes -> {out}")
    coverage = figures["coverage"]
    if "counts_frac" in coverage and coverage["organism"] is not None:
        print(f"{dataset}: {coverage['counts_frac']:.1%} of counts on genes with an Ensembl id")
        if line := lost_counts(1 - coverage["counts_frac"], coverage["lost_names"]):
            print(f"{dataset}: {line}")
    if coverage.get("reference"):
        print(f"{dataset}: {coverage['ortholog_frac']:.1%} of its genes have an ortholog in {coverage['reference']}")
    for name, labels in figures.get("labels", {}).items():
        print(f"{dataset}: {sentence(name, labels)}")
    if dropped:
        print(f"{dataset}: cells dropped: {dropped}")
