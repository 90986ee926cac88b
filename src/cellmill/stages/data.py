"""Stages that make a corpus, from inputs to shards (`workflow/rules/data.smk`)."""

import re
from pathlib import Path
from typing import Any

from cellmill import __version__
from cellmill.config.corpus import Preprocess, Shard, is_fasta
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
    FORMAT,
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
from cellmill.data.prepare.unpack import unpack_cells
from cellmill.data.saved_work import SavedWork, remove_work
from cellmill.data.shards.divide import make_plan
from cellmill.data.shards.plan import find_plan
from cellmill.data.shards.writer import write_part, write_shards
from cellmill.errors import ConfigError, DataError
from cellmill.files import parse_json, remove_incomplete, write_json


def fetch(*, input: str, out: Path, cache: Path | None = None) -> None:
    """Copy the file or folder at the URL `input` into `cache`.

    Write its path, SHA-256 and size to `out` (.json).
    """
    copy = fetch_url(input, cache)
    write_json(out, copy.to_json())
    print(f"{redacted(input)}: {copy.n_bytes:,} bytes, sha256 {copy.sha256[:12]} -> {copy.path}")


def demo(*, out: Path) -> None:
    """Write the demo cells to `out` (.h5ad)."""
    obs, var, counts = read_demo()
    write_cells(out, obs, var, [counts], counts.nnz, count_dtype(int(counts.data.max())))
    print(f"{len(obs):,} cells x {len(var):,} genes -> {out}")


def simulate(
    *, out: Path, cells: int, genes: int, types: int, batches: int, perturbations: int, seed: int
) -> None:
    """Write `cells` simulated cells to `out` (.h5ad), or sequences of `types` families (FASTA)."""
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
    """Read counts or sequences of `input`, a path or URL.

    Write the cells to `out` (.h5ad), QC to `report` (.json).

    `columns` are the dataset's filter, labels and roles: obs columns, which are checked before
    counts are read. What a killed process saved next to `out` is not done again.
    """
    remove_incomplete(out)
    path = local_input(input)
    before = state_of(path)
    read = {"counts": counts, "counts_rule": counts_rule, "gene_column": gene_column}
    facts = {
        "input": {"files": before, **read},
        "options": options.preprocess.model_dump(mode="json"),
        "version": [FORMAT, __version__],
    }
    with SavedWork(out, facts) as saved:
        with open_dataset(path, counts, counts_rule, gene_column) as reader:
            if reader.ordered:
                qc = preprocess_sequences(reader, options.preprocess, out, columns)
            else:
                qc = preprocess_cells(reader, options.preprocess, out, columns, saved)
            reader.warn_of_values()
        origin = origin_of(path) | {"counts": counts, "source": source, "licence": licence}
        if state_of(path) != before:
            out.unlink()
            raise DataError(f"{path}: it changed while it was read; run preprocess again")
        if reader.n_rounded:
            origin |= {"counts_rule": counts_rule, "n_rounded": reader.n_rounded}
        named = columns.model_dump(exclude_none=True)
        if named:
            origin["columns"] = named
        notes = describe_merged(qc.get("perturbations", {}))  # the report shows them too
        if "controls" in qc:
            notes += describe_controls(qc["controls"])
        if notes:
            qc["notes"] = notes
        write_json(report, {"dataset": dataset, "source": origin, **qc})
    lines = _preprocessed(qc, dataset, out)
    if reader.n_rounded:
        rounded = f"{reader.n_rounded:,} values had fractions and were rounded (counts_rule {counts_rule})"
        lines.insert(1, rounded)
    lines += _warnings(qc, options.preprocess)
    for line in lines:
        print(f"{dataset}: {line}")


def _preprocessed(qc: dict[str, Any], dataset: str, out: Path) -> list[str]:
    """Lines on what became of the cells, genes and labels of a dataset."""
    cells = qc["cells"]
    genes = qc["genes"]
    coverage = qc["coverage"]
    lines = [
        f"{cells['out']:,} of {cells['in']:,} cells, {genes['out']:,} of {genes['in']:,} genes -> {out}",
        *coverage.get("notes", ()),
    ]
    if "counts_frac" in coverage and coverage["organism"] is not None:
        lines.append(f"{coverage['counts_frac']:.1%} of counts on genes with an Ensembl id")
        lost = lost_counts(1 - coverage["counts_frac"], coverage["lost_names"])
        if lost:
            lines.append(lost)
    if coverage.get("reference"):
        orthologs = f"{coverage['ortholog_frac']:.1%} of its genes have an ortholog"
        lines.append(f"{orthologs} in {coverage['reference']}")
    lines += [describe_label_map(name, labels) for name, labels in qc.get("labels", {}).items()]
    for name, n_cells in qc.get("no_label", {}).items():
        lines.append(describe_no_label(name, n_cells, dataset))
    lines += qc.get("notes", ())
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in cells["dropped"].items() if n)
    if dropped:
        lines.append(f"cells dropped: {dropped}")
    return lines


def _warnings(qc: dict[str, Any], options: Preprocess) -> list[str]:
    """Lines on counts that are too sparse, and a quality control that drops most cells."""
    warnings = []
    if qc.get("sparse"):
        warnings.append(f"warning: {qc['sparse']}")
    cells = qc["cells"]
    n_cells = cells["in"] - cells["dropped"]["filter"]
    by_quality = {name: cells["dropped"].get(name, 0) for name in QUALITY}
    if 2 * sum(by_quality.values()) > n_cells:
        name, change = strictest(by_quality)
        drops = f"preprocess.{name} {getattr(options, name):g} drops {by_quality[name]:,} of {n_cells:,} cells"
        warnings.append(
            f"warning: quality control drops more than half of the cells: {drops}; {change} it to keep them"
        )
    return warnings


def vocabulary(
    *, options: VocabularyOptions, cells: list[Path], out: Path, split: str | None = None
) -> None:
    """Read preprocessed .h5ad files; write the vocabulary to `out` (.tsv).

    `split`, options of the shard section as JSON, leaves out the cells that the shards will hold
    out. Sums of a killed process are not computed again.
    """
    shard = None if split is None else check_options(Shard, parse_json(split, "--split"), "--split")
    vocabulary = build_vocabulary(cells, options.vocabulary, shard, out)
    vocabulary.write(out)
    remove_work(out)
    print(f"genes and medians are those of {vocabulary.training or 'all cells'}")
    print(f"{vocabulary.n_genes:,} genes, digest {vocabulary.digest[:12]} -> {out}")


def divide(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Give every cell of `cells` a split, a shard and a position.

    Write the plan to the folder of `out` (plan.json).

    The manifest next to that folder is removed.
    """
    manifest = out.parent.with_name("manifest.json")
    plan = make_plan(cells, Vocabulary.read(vocabulary), options.shard, manifest)
    sizes = ", ".join(f"{n:,} {name}" for name, n in plan.n_obs.items())
    print(f"cells: {sizes} in {len(plan.shards()):,} shards -> {out}")


def shard_part(
    *, options: ShardOptions, cells: list[Path], vocabulary: Path, part: str, out: Path
) -> None:
    """Write the shards of `part` (as `3-of-8`) above the plan's folder, then `out` in that folder.

    Shards that a killed process finished are kept.
    """
    match = re.fullmatch(r"([0-9]+)-of-([0-9]+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--part: expected a part such as 3-of-8, got {part!r}")
    number = int(match[1])
    parts = int(match[2])
    genes = Vocabulary.read(vocabulary)
    plan = find_plan(cells, genes, options.shard, out.parent)
    written = write_part(plan, cells, genes, out.parent.parent, number - 1, parts)
    write_json(out, {"plan": plan.key, "shards": written})
    print(f"{written:,} of {len(plan.shards()):,} shards -> {out.parent.parent}")


def shard(*, options: ShardOptions, cells: list[Path], vocabulary: Path, out: Path) -> None:
    """Write shards of `cells` over the genes of `vocabulary`, then the manifest `out` next to them.

    Shards that a killed process or the jobs of `shard_part` finished are kept.
    """
    manifest = write_shards(cells, Vocabulary.read(vocabulary), options.shard, out)
    sizes = ", ".join(f"{entry.n_obs:,} {name}" for name, entry in manifest.splits.items())
    left_out = sum(manifest.left_out.values())
    note = f"; {left_out:,} dropped: no gene in the vocabulary" if left_out else ""
    print(f"cells: {sizes}{note} -> {out}")
    if manifest.duplicates:
        where = ", ".join(f"{name}: {n:,}" for name, n in manifest.duplicates.items())
        done = "kept; shard.duplicates: drop leaves them out"
        if options.shard.duplicates == "drop":
            done = "dropped"
        n_duplicates = sum(manifest.duplicates.values())
        print(f"{n_duplicates:,} cells are equal to an earlier one ({where}): {done}")
    if manifest.across_splits:
        print(
            f"{manifest.across_splits:,} cells have an equal one in another split: they are not held out"
        )


def unpack(*, input: Path, out: Path) -> None:
    """Write the cells of a shard, or of a file that preprocess wrote, to an .h5ad with X."""
    check_h5ad(out, "--out")
    n_cells = unpack_cells(input, out)
    print(f"{out}: {n_cells:,} cells, {out.stat().st_size / 1e6:,.1f} MB")
