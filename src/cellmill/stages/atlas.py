"""Stages of an atlas: atlas, from embeddings of stage `embed`, and map, of new cells to it.

map writes an .h5ad, then next to it a .map.tsv with a line for each cell: its obs name and the obs
columns that map adds. A .map.tsv that exists is the one of its .h5ad.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cellmill.config.datasets import CountsRule
from cellmill.config.load import ATLAS, find_atlas
from cellmill.config.options import AtlasOptions, MapOptions
from cellmill.config.run import Atlas
from cellmill.data.inputs.formats import open_dataset
from cellmill.errors import ConfigError, DataError, did_you_mean
from cellmill.evaluate.atlas.build import make_atlas, read_embedded, write_atlas
from cellmill.evaluate.atlas.mapping import map_vectors
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.inference.embed import describe_limits, embed_cells, load_for_inference
from cellmill.evaluate.inference.files import (
    KEY,
    check_input,
    digest_embedder,
    has_embedder,
    write_prediction,
)
from cellmill.evaluate.seen.seen_cells import mark_seen_cells
from cellmill.files import atomic_path, name_datasets, refuse_overwriting, sha256_file


def atlas(
    *,
    options: AtlasOptions,
    model: Path,
    embeddings: Sequence[Path],
    labels: Sequence[str],
    atlas: Path | None = None,
) -> None:
    """Write the atlas of the cells of `embeddings`, by default to folder `atlas` of `model`.

    `labels` are the obs column of each file, `-` for none.
    """
    if len(labels) != len(embeddings):
        raise ConfigError(
            f"expected as many --labels as --embeddings, got {len(labels)} and {len(embeddings)}"
        )
    names = name_datasets(embeddings, "--embeddings")
    started = time.process_time()
    network, _, _, config = load_for_inference(model)
    embedder = digest_embedder(config)
    digest = sha256_file(model / "model.safetensors")
    section = options.atlas
    datasets = []
    for path, label in zip(embeddings, labels):
        width = network.vector_width
        donors = section.donor_columns
        datasets.append(read_embedded(path, label, donors, digest, width, embedder))
    folder = model / ATLAS if atlas is None else atlas
    if not any(len(cells.vectors) for cells in datasets):
        raise DataError(f"{embeddings[0]}: no cell has a vector; an atlas requires at least one")
    known = {name for cells in datasets for name in cells.obs_columns}
    if section.donor_columns != Atlas.model_validate({}).donor_columns:
        for name in section.donor_columns:
            if name in known:
                continue
            hint = did_you_mean(name, sorted(known))
            message = f"atlas.donor_columns: no obs column {name!r}; {hint}"
            if known.isdisjoint(section.donor_columns):
                raise DataError(message)
            print(f"warning: {message}")
    is_certain = all(map(has_embedder, embeddings))
    made = make_atlas(datasets, digest, section, embedder if is_certain else None)
    write_atlas(folder, made)
    record = made.record
    print(
        f"{record.n_cells:,} cells -> {folder}; datasets: {len(names):,}, donors: {len(record.donors):,}, labels: "
        f"{len(record.labels):,}, distinct vectors: {record.n_points:,}; {time.process_time() - started:.1f} CPU-s"
    )
    if record.accuracy is not None:
        without = "without their donor" if record.held_out == "donor" else "without themselves"
        print(f"labels of cells {without}: {record.accuracy:.3f} right by the vote of the others")
    if record.held_out == "cell":
        columns = ", ".join(section.donor_columns)
        print(
            f"warning: all cells are of one donor (obs columns {columns}): distances and rates are too good for a "
            "new donor"
        )


def map_cells(
    *,
    options: MapOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    atlas: Path | None = None,
    append: bool = False,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write labels, neighbours and distances in the atlas of the cells of `input` to `out`.

    `input` and `append` as in `embed`.
    """
    path = check_input(input, out, append)
    table = out.with_suffix(".map.tsv")
    refuse_overwriting(table, [("--input", path)])
    folder = find_atlas(model, atlas)
    loaded = load_for_inference(model)
    width = loaded.network.vector_width
    config = loaded.config
    embedder = digest_embedder(config)
    cell_atlas = CellAtlas.read(folder, config["weights_sha256"], width, embedder)
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        embedding = embed_cells(reader, loaded, options.embed)
        seen = mark_seen_cells(reader, model)
        obs = reader.obs
    mapped = map_vectors(cell_atlas, embedding.vectors, seen, options.map)
    mapped.obsm[KEY] = embedding.vectors
    with atomic_path(table) as temporary:
        columns = pd.DataFrame(mapped.obs, index=obs.index)
        columns.to_csv(temporary, sep="\t", index_label="cell", lineterminator="\n")
        table.unlink(missing_ok=True)  # a killed process leaves no table of other cells
        write_prediction(out, obs, mapped, path if append else None)
    coverage = f"{embedding.coverage_frac:.1%} of counts on known genes"
    for line in [coverage, *mapped.lines, *describe_limits(embedding)]:
        print(f"{path.stem}: {line}")
    print(f"{path.stem}: -> {out} and {table}")
