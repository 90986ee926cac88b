"""Stages that make a corpus, from inputs to shards (`workflow/rules/data.smk`)."""

import re
from pathlib import Path

from cellmill.config.corpus import Shard, is_fasta
from cellmill.config.datasets import NO_COLUMNS, CountsRule, ObsColumns, redacted
from cellmill.config.load import check_options
from cellmill.config.options import PreprocessOptions, ShardOptions, VocabularyOptions
from cellmill.data.genes.build import build_vocabulary
from cellmill.data.genes.names import lost_counts
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.fetch import fetch_url, local_input, origin_of, state_of
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, count_dtype, write_cells
from cellmill.data.prepare.demo import read_demo
from cellmill.data.prepare.preprocess import (
    QUALITY,
    preprocess_cells,
    preprocess_sequences,
    strictest,
)
from cellmill.data.prepare.proteins import write_sequences
from cellmill.data.prepare.qc_lines import (
    describe_controls,
    describe_label_map,
    describe_merged,
    describe_no_label,
)
from cellmill.data.prepare.simulate import Simulation
from cellmill.data.shards.plan import find_plan, make_plan
from cellmill.data.shards.writer import write_part, write_shards
from cellmill.errors import ConfigError, DataError
from cellmill.files import parse_json, remove_incomplete, write_json


def fetch(*, input: str, out: Path, cache: Path | None = None) -> None:
    """Copy the file or folder at the URL `input` into `cache`; write its path, SHA-256 and size to
    `out` (.json).
    """
    found = fetch_url(input, cache)
    write_json(out, found.to_json())
    print(f"{redacted(input)}: {found.n_bytes:,} bytes, sha256 {found.sha256[:12]} -> {found.path}")


def demo(*, out: Path) -> None:
    """Write the demo cells to `out` (.h5ad)."""
    obs, var, counts = read_demo()
    write_cells(out, obs, var, [counts], counts.nnz, count_dtype(int(counts.data.max())))
    print(f"{len(obs):,} cells x {len(var):,} genes -> {out}")


def simulate(
    *, out: Path, cells: int, genes: int, types: int, batches: int, perturbations: int, seed: int
) -> None:
    """Write `cells` simulated cells to `out` (.h5ad), or as many sequences of `types` families to a
    FASTA file.
    """
    if is_fasta(out):
        write_sequences(out, cells, types, seed)
        print(f"{cells:,} sequences -> {out}")
        return
    check_h5ad(out, "--out")
    simulation = Simulation(cells, genes, types, batches, perturbations, seed)
    write_cells(out, simulation.obs, simulation.var, simulation.blocks(), None, count_dtype(0))
    print(f"{cells:,} cells x {genes:,} genes -> {out}")


def preprocess(
    *,
    options: PreprocessOptions,
    input: Path | str,
    counts: str,
    dataset: str,
    columns: ObsColumns = NO_COLUMNS,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
    source: str = "",
    licence: str = "",
    out: Path,
    report: Path,
) -> None:
    """Read counts or sequences of `input`, a path or URL; write the cells to `out` (.h5ad), QC to
    `report` (.json).

    `columns` are the dataset's filter, labels and roles: obs columns, which are checked before
    counts are read.
    """
    remove_incomplete(out)
    path = local_input(input)
    before = state_of(path)
    with open_dataset(path, counts) as reader:
        reader.counts_rule = counts_rule
        if gene_column is not None:
            reader.use_gene_column(gene_column)
        prepare = preprocess_sequences if reader.ordered else preprocess_cells
        qc = prepare(reader, options.preprocess, out, columns)
        reader.warn_if_rounded()
    origin = origin_of(path) | {"counts": counts, "source": source, "licence": licence}
    if state_of(path) != before:
        out.unlink()
        raise DataError(f"{path}: it changed while it was read; run preprocess again")
    if reader.n_rounded:
        origin |= {"counts_rule": counts_rule, "n_rounded": reader.n_rounded}
    origin |= {"columns": given} if (given := columns.model_dump(exclude_none=True)) else {}
    notes = describe_merged(qc.get("perturbations", {}))  # the report shows them too
    notes += describe_controls(qc["controls"]) if "controls" in qc else []
    qc |= {"notes": notes} if notes else {}
    write_json(report, {"dataset": dataset, "source": origin, **qc})
    cells = qc["cells"]
    genes = qc["genes"]
    coverage = qc["coverage"]
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in cells["dropped"].items() if n)
    print(
        f"{dataset}: {cells['out']:,} of {cells['in']:,} cells, {genes['out']:,} of {genes['in']:,} genes -> {out}"
    )
    if reader.n_rounded:
        print(
            f"{dataset}: {reader.n_rounded:,} values had fractions and were rounded (counts_rule {counts_rule})"
        )
    for note in coverage.get("notes", ()):
        print(f"{dataset}: {note}")
    if "counts_frac" in coverage and coverage["organism"] is not None:
        print(f"{dataset}: {coverage['counts_frac']:.1%} of counts on genes with an Ensembl id")
        line = lost_counts(1 - coverage["counts_frac"], coverage["lost_names"])
        if line:
            print(f"{dataset}: {line}")
    if coverage.get("reference"):
        print(
            f"{dataset}: {coverage['ortholog_frac']:.1%} of its genes have an ortholog in {coverage['reference']}"
        )
    for name, labels in qc.get("labels", {}).items():
        print(f"{dataset}: {describe_label_map(name, labels)}")
    for name, n_cells in qc.get("no_label", {}).items():
        print(f"{dataset}: {describe_no_label(name, n_cells, dataset)}")
    for line in notes:
        print(f"{dataset}: {line}")
    if dropped:
        print(f"{dataset}: cells dropped: {dropped}")
    if qc.get("sparse"):
        print(f"{dataset}: warning: {qc['sparse']}")
    by_quality = {name: cells["dropped"].get(name, 0) for name in QUALITY}
    if 2 * sum(by_quality.values()) > (n := cells["in"] - cells["dropped"]["filter"]):
        name, change = strictest(by_quality)
        drops = f"preprocess.{name} {getattr(options.preprocess, name):g} drops {by_quality[name]:,} of {n:,} cells"
        print(
            f"{dataset}: warning: quality control drops more than half of the cells: {drops}; {change} it to keep them"
        )


def vocabulary(
    *, options: VocabularyOptions, cells: list[Path], out: Path, split: str | None = None
) -> None:
    """Read preprocessed .h5ad files; write the vocabulary to `out` (.tsv).

    `split`, options of the shard section as JSON, leaves out the cells that the shards will hold
    out.
    """
    shard = None if split is None else check_options(Shard, parse_json(split, "--split"), "--split")
    vocabulary = build_vocabulary(cells, options.vocabulary, shard)
    vocabulary.write(out)
    print(f"genes and medians are those of {vocabulary.training or 'all cells'}")
    print(f"{vocabulary.n_genes:,} genes, digest {vocabulary.digest[:12]} -> {out}")


def divide(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Give every cell of `cells` a split, a shard and a position; write the plan to the folder of
    `out` (plan.json).

    The manifest beside that folder is removed.
    """
    plan = make_plan(
        cells, Vocabulary.read(vocabulary), options.shard, out.parent.with_name("manifest.json")
    )
    cells_of = ", ".join(f"{n:,} {name}" for name, n in plan.n_obs.items())
    print(f"cells: {cells_of} in {len(plan.shards()):,} shards -> {out}")


def shard_part(
    *, options: ShardOptions, cells: list[Path], vocabulary: Path, part: str, out: Path
) -> None:
    """Write the shards of `part` (as `3-of-8`) above the plan's folder, in which `out` lies, then
    `out` itself.

    Shards that a killed process finished are kept.
    """
    named = re.fullmatch(r"([0-9]+)-of-([0-9]+)", part)
    if named is None or not 1 <= int(named[1]) <= int(named[2]):
        raise ConfigError(f"--part: expected a part such as 3-of-8, got {part!r}")
    number = int(named[1])
    parts = int(named[2])
    known = Vocabulary.read(vocabulary)
    plan = find_plan(cells, known, options.shard, out.parent)
    written = write_part(plan, cells, known, out.parent.parent, number - 1, parts)
    write_json(out, {"plan": plan.key, "shards": written})
    print(f"{written:,} of {len(plan.shards()):,} shards -> {out.parent.parent}")


def shard(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Write shards of `cells` over the genes of `vocabulary` beside `out`, then the manifest to
    `out`.

    Shards that a killed process or the jobs of `shard_part` finished are kept.
    """
    manifest = write_shards(cells, Vocabulary.read(vocabulary), options.shard, out)
    sizes = ", ".join(f"{entry.n_obs:,} {name}" for name, entry in manifest.splits.items())
    left_out = sum(manifest.left_out.values())
    note = f"; {left_out:,} dropped: no gene in the vocabulary" if left_out else ""
    print(f"cells: {sizes}{note} -> {out}")
    if manifest.duplicates:
        where = ", ".join(f"{name}: {n:,}" for name, n in manifest.duplicates.items())
        dropped = options.shard.duplicates == "drop"
        done = "dropped" if dropped else "kept; shard.duplicates: drop leaves them out"
        print(
            f"{sum(manifest.duplicates.values()):,} cells are equal to an earlier one ({where}): {done}"
        )
    if manifest.across_splits:
        print(
            f"{manifest.across_splits:,} cells have an equal one in another split: they are not held out"
        )
