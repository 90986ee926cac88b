"""evaluate: embeddings judged on cells the model never saw, beside baselines, and how it fills in what is hidden.

metrics.json, written last:

    model       digest (of model.safetensors), vocabulary_digest, step, objective
    fingerprint of the shards that say which cells were seen, and that gene means come from
    options     as resolved
    datasets    by name, the stem of the cells file:
        n_cells, n_scored, cells (heldout or all), n_without_genes, in_corpus, label (or null)
        probe           null, or n_cells, classes, dropped_classes, n_unlabelled, n_left_out, folds, neighbors,
                        rows (see evaluate.probe.probe), verdict (sentences)
        probe_skipped   why there is none although there is a label, or null
        reconstruction  objective, n_cells, mask_frac and what evaluate.reconstruct.judge_values or judge_genes give

umap.tsv beside it has dataset, obs_name, label, x, y and heldout (1 or 0) of each cell that is drawn. A class with
fewer scored cells than folds is left out of the probe by name; folds are never lowered, so that runs stay comparable.
"""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch

from cellmill.config.options import EvaluateOptions
from cellmill.config.run import Evaluate
from cellmill.config.tokens import Tokens
from cellmill.data.counts_reader import CountsReader, open_counts
from cellmill.data.manifest import Manifest
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.embed import embed_cells, read_embedding
from cellmill.evaluate.heldout import held_out, seen_cells
from cellmill.evaluate.probe import choose_cells, log_normalise, probe, verdict
from cellmill.evaluate.projection import UMAP_COLUMNS, drawn, project
from cellmill.evaluate.reconstruct import read_train_tokens, reconstruct
from cellmill.files import sha256_file, write_json, write_text
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, load_model, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics
from cellmill.parallel.materialize import materialize

TOKEN_BUDGET = 16_384  # tokens in one forward pass; results do not depend on it
ROW_BLOCK = 4096


@dataclass(frozen=True)
class Subject:
    """The model under evaluation, and what is compared with it."""

    network: Model
    untrained: Model
    vocabulary: Vocabulary
    tokens: Tokens
    objective: str
    train: GeneStatistics


def run(
    *,
    options: EvaluateOptions,
    model: Path,
    manifest: Path,
    cells: list[Path],
    embeddings: list[Path],
    labels: list[str],
    out: Path,
    ancestors: Sequence[Path] = (),
) -> None:
    """Writes metrics.json to `out` and umap.tsv beside it.

    `labels` are obs columns, '-' for none. `ancestors` are the manifests of the runs that the first weights came
    from: what those were trained on is not held out either.
    """
    names = _dataset_names(cells, embeddings, labels)
    shards = Manifest.read(manifest)
    network, vocabulary, config = load_model(model)
    if vocabulary.digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{manifest}: its vocabulary is {shards.vocabulary['digest'][:12]}, the model's {vocabulary.digest[:12]}; "
            "give the shards that the model was trained on"
        )
    digest, subject = sha256_file(model / "model.safetensors"), _subject(network, vocabulary, config, shards, options)
    seen = seen_cells([shards, *map(Manifest.read, ancestors)], names)
    datasets: dict[str, Any] = {}
    points: list[tuple[Any, ...]] = []
    for name, path, embedding, label in zip(names, cells, embeddings, labels):
        with open_counts(path) as reader:
            vectors = read_embedding(embedding, reader.obs.index, digest)
            column = None if label == "-" else _label_column(reader, label)
            unseen = held_out(reader.obs.index, seen[name])
            datasets[name] = _judge(subject, options.evaluate, name, reader, vectors, column, unseen)
            datasets[name]["in_corpus"] = bool(seen[name])
            points += _points(options.evaluate, name, reader.obs.index, vectors, column, unseen)
    _write_points(out.parent / "umap.tsv", points)
    about: dict[str, Any] = {"digest": digest, "vocabulary_digest": vocabulary.digest}
    about |= {"step": config.get("step"), "objective": subject.objective}
    resolved = options.evaluate.model_dump(mode="json")
    metrics = {"model": about, "fingerprint": shards.fingerprint, "options": resolved, "datasets": datasets}
    write_json(out, metrics)  # last: its existence means that umap.tsv is there too


def _dataset_names(cells: list[Path], embeddings: list[Path], labels: list[str]) -> list[str]:
    if not len(cells) == len(embeddings) == len(labels):
        raise ConfigError(
            f"--cells names {len(cells)} files, --embeddings {len(embeddings)}, --labels {len(labels)} columns; "
            "one of each is wanted for every dataset"
        )
    names = [path.stem for path in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--cells: two files are called {twice[0]!r}; a dataset is evaluated under its file's name")
    return names


def _subject(
    network: Model, vocabulary: Vocabulary, config: dict[str, Any], shards: Manifest, options: EvaluateOptions
) -> Subject:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # masks of the evaluation hide the fraction asked for here, whatever the training hid
    spec = spec_of(config, vocabulary.n_genes)
    spec = replace(spec, objective=spec.objective.model_copy(update={"mask_frac": options.evaluate.mask_frac}))
    judged, untrained = (build(spec).to_empty(device="cpu") for _ in range(2))
    judged.load_state_dict(network.state_dict(), assign=True)
    materialize(untrained, device, initial_tensors(untrained, options.evaluate.seed, None, vocabulary))
    tokens = Tokens.model_validate(config["tokens"])
    return Subject(
        judged.to(device).eval(),
        untrained.eval(),
        vocabulary,
        tokens,
        judged.objective.config.name,
        read_train_tokens(shards, tokens),
    )


def _label_column(reader: CountsReader, label: str) -> pd.Series:
    if label not in reader.obs:
        known = [str(name) for name in reader.obs.columns]
        near = difflib.get_close_matches(label, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise DataError(f"{reader.path}: no obs column {label!r} (the dataset's label); {hint}")
    column = reader.obs[label]
    values = column.dropna().astype(str).unique()
    if len(values) < 2:
        what = f"one class, {values[0]!r}" if len(values) else "no values"
        raise DataError(
            f"{reader.path}: obs column {label!r} has {what}; a probe needs two: name another label, or none"
        )
    return column


def _judge(
    subject: Subject,
    options: Evaluate,
    name: str,
    reader: CountsReader,
    vectors: np.ndarray,
    column: pd.Series | None,
    unseen: np.ndarray,
) -> dict[str, Any]:
    scored = unseen if options.cells == "heldout" else np.ones(reader.n_obs, dtype=bool)
    if not scored.any():
        raise DataError(
            f"{reader.path}: no held-out cells: all {reader.n_obs:,} were trained or validated on; "
            "raise shard.test_frac, or set evaluate.cells to all"
        )
    embedded = np.isfinite(vectors).all(axis=1)
    without = int((scored & ~embedded).sum())
    scored = scored & embedded
    print(f"{name}: {int(scored.sum()):,} of {reader.n_obs:,} cells are scored ({options.cells})", flush=True)
    table, skipped = None, None
    if column is not None:
        table, skipped = _probe(subject, options, name, reader, vectors, column, scored)
    filled = reconstruct(
        subject.network,
        reader,
        subject.vocabulary,
        subject.tokens,
        subject.train,
        chosen=scored,
        objective=subject.objective,
        seed=options.seed,
        token_budget=TOKEN_BUDGET,
    )
    filled = filled | {"mask_frac": options.mask_frac}
    for line in filled["verdict"]:
        print(f"{name}: {line}", flush=True)
    return {
        "n_cells": reader.n_obs,
        "n_scored": int(scored.sum()),
        "cells": options.cells,
        "n_without_genes": without,
        "label": None if column is None else str(column.name),
        "probe": table,
        "probe_skipped": skipped,
        "reconstruction": filled,
    }


def _probe(
    subject: Subject,
    options: Evaluate,
    name: str,
    reader: CountsReader,
    vectors: np.ndarray,
    column: pd.Series,
    scored: np.ndarray,
) -> tuple[dict[str, Any] | None, str | None]:
    places = np.flatnonzero(scored)
    chosen = choose_cells(column.iloc[places], options.folds, options.seed)
    classes = ", ".join(f"{label} {n:,}" for label, n in chosen.classes.items())
    print(f"{name}: {column.name}: {classes or 'no class is large enough'}", flush=True)
    if chosen.dropped:
        few = ", ".join(f"{label} {n:,}" for label, n in chosen.dropped.items())
        print(f"{name}: {column.name}: left out, with fewer cells than the {options.folds} folds: {few}", flush=True)
    if len(chosen.classes) < 2:
        reason = (
            f"{len(chosen.classes)} classes of {column.name} have the {options.folds} scored cells that as many folds "
            "need; raise shard.test_frac or lower evaluate.folds"
        )
        print(f"{name}: no probe: {reason}", flush=True)
        return None, reason
    cells = places[chosen.cells]
    mask = np.zeros(reader.n_obs, dtype=bool)
    mask[cells] = True
    plain = embed_cells(reader, subject.untrained, subject.vocabulary, subject.tokens, TOKEN_BUDGET, mask)
    rows = probe(
        vectors[cells],
        plain.vectors,
        log_normalise(_counts(reader, mask)),
        chosen.labels,
        folds=options.folds,
        neighbors=options.neighbors,
        seed=options.seed,
    )
    sentences = verdict(rows)
    for line in sentences:
        print(f"{name}: {line}", flush=True)
    return {
        "n_cells": len(cells),
        "classes": chosen.classes,
        "dropped_classes": chosen.dropped,
        "n_unlabelled": chosen.n_unlabelled,
        "n_left_out": chosen.n_left_out,
        "folds": options.folds,
        "neighbors": options.neighbors,
        "rows": rows,
        "verdict": sentences,
    }, None


def _counts(reader: CountsReader, mask: np.ndarray) -> sp.csr_matrix:
    blocks, first = [], 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")


def _points(
    options: Evaluate, name: str, obs_names: pd.Index, vectors: np.ndarray, column: pd.Series | None, unseen: np.ndarray
) -> list[tuple[Any, ...]]:
    embedded = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    places = embedded[drawn(len(embedded), options.seed)]
    where = project(vectors[places], options.seed)
    text = [""] * len(obs_names) if column is None else column.astype(object).where(column.notna(), "").astype(str)
    label = np.asarray(text, dtype=object)
    return [
        (name, obs_names[place], label[place], f"{x:.5g}", f"{y:.5g}", int(unseen[place]))
        for place, (x, y) in zip(places, where)
    ]


def _write_points(path: Path, points: list[tuple[Any, ...]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(UMAP_COLUMNS)
    writer.writerows(points)
    write_text(path, text.getvalue())
