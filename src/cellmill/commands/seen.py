"""seen: cells of a file that an exported model was trained on."""

from pathlib import Path

from cellmill.config.datasets import CountsRule
from cellmill.config.load import advising, read_model_config
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.formats import open_dataset
from cellmill.evaluate.seen.seen_cells import tabulate_seen_cells
from cellmill.files import atomic_path, check_writable


def seen(
    *,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path | None,
    rows: bool,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Print how many cells of `input` were in training, and with `rows` each of them.

    `out` (.tsv) gets a row for each cell of the file: row from 0, cell, and seen (exact, near or new).
    Raise UserError if the file, or the record of the training cells, cannot be read.
    """
    if out is not None:
        check_writable(out)
    path = local_input(input)
    read_model_config(model / "config.json")
    with advising():
        vocabulary = Vocabulary.read(model / "vocabulary.tsv")
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        table, notes = tabulate_seen_cells(reader, model, vocabulary)
    counts_by_kind = table["seen"].value_counts()
    n_seen = len(table) - counts_by_kind["new"]
    print(
        f"{path.stem}: {n_seen:,} of {len(table):,} cells ({n_seen / max(1, len(table)):.1%}) were in training or "
        f"validation: {counts_by_kind['exact']:,} with equal counts, {counts_by_kind['near']:,} near copies (barcode "
        "of a training sample)"
    )
    for note in notes:
        print(f"{path.stem}: {note}")
    table = table.reset_index().rename_axis("row").reset_index()
    if rows:
        print(table[table["seen"] != "new"].to_csv(sep="\t", index=False), end="")
    if out is not None:
        with atomic_path(out) as temporary:
            table.to_csv(temporary, sep="\t", index=False)
