"""Stages that apply an exported model to cells: embed, embed_external, teach, predict and generate.

embed_external runs a command of another environment, whose embedding becomes a row next to the
model's. Its output is checked and kept in the form of stage `embed`, so that `evaluate` reads no file
that another package wrote.

generate draws cells from a model of family `autoregressive`. A row of X has the cell's genes in the
order in which they were drawn; layer `rank` has the same order as numbers from 1, for tools that
sort columns. X holds log(1 + counts per 10,000) as predicted (tokenizer continuous), drawn bins
(binned), or 1 (tokenizers without values).
"""

import os
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill import __version__
from cellmill.config.corpus import DATASET
from cellmill.config.datasets import CountsRule
from cellmill.config.evaluate import ExternalModel, command_words
from cellmill.config.load import check_options
from cellmill.config.options import EmbedOptions, PredictOptions
from cellmill.data.genes.names import rows_of_known_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.fetch import state_of
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, create_h5, write_anndata
from cellmill.data.prepare.unpack import plain_cells
from cellmill.data.saved_work import SavedWork
from cellmill.data.shards.index import ABOUT, TABLE, new_array
from cellmill.data.shards.manifest import TRAINING_SPLITS, Manifest
from cellmill.data.shards.reader import read_names
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.calibration import NO_VALIDATION
from cellmill.evaluate.inference.embed import describe_limits, embed_cells, load_for_inference
from cellmill.evaluate.inference.files import (
    EMBEDDER,
    check_input,
    digest_embedder,
    read_external,
    read_vectors,
    write_embedding,
    write_prediction,
)
from cellmill.evaluate.inference.label_counts import count_labels
from cellmill.evaluate.inference.predict import (
    LABEL,
    choose_thresholds,
    find_classifiers,
    predict_heads,
)
from cellmill.evaluate.inference.saved_vectors import list_embedding_facts
from cellmill.evaluate.seen.seen_cells import mark_seen_cells
from cellmill.files import remove_incomplete, sha256_file, write_json
from cellmill.models.families.autoregressive import (
    AutoregressiveModel,
    GeneratedCell,
    Sampling,
    generate_cells,
)
from cellmill.train.telemetry import memory_bytes


def embed(
    *,
    options: EmbedOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    append: bool = False,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write embeddings of the cells of `input`, preprocessed or raw, to `out` (.h5ad).

    `input` may be a URL.

    With them are obs and nothing else, or, with `append`, everything in the .h5ad `input`, which
    `out` may be. Vectors that a killed process saved next to `out` are not computed again.
    """
    path = check_input(input, out, append)
    remove_incomplete(out)
    loaded = load_for_inference(model)
    network, vocabulary, _, config = loaded
    read = {"counts": counts, "counts_rule": counts_rule, "gene_column": gene_column}
    facts = list_embedding_facts(path, read, model, network, options.embed)
    started = time.perf_counter()
    with (
        SavedWork(out, {"cellmill": __version__, **facts}) as saved,
        open_dataset(path, counts, counts_rule, gene_column) as reader,
    ):
        embedding = embed_cells(reader, loaded, options.embed, saved=saved)
        seconds = embedding.earlier_s + time.perf_counter() - started
        peak_gb = memory_bytes(next(network.parameters()).device)[0] / 1e9
        about = {
            "model_digest": facts["model"]["weights"],
            EMBEDDER: digest_embedder(config),
            "vocabulary_digest": vocabulary.digest,
            # obs columns whose labels the model was trained with
            "supervised_by": ", ".join(config.get("supervised_by", [])),
            "precision": options.embed.precision,
            "coverage_frac": embedding.coverage_frac,
            "n_without_genes": embedding.n_without_genes,
            "genes": asdict(embedding.genes) | {"absent": list(embedding.genes.absent)},
            "seconds": seconds,
            "peak_gb": peak_gb,
        }
        if not {*facts["input"]["files"]} <= {*state_of(path)}:  # another job may add files
            raise DataError(f"{path}: it changed while it was read; run embed again")
        write_embedding(out, reader.stored_obs, embedding.vectors, about, path if append else None)
        n_obs = reader.n_obs
    for line in (
        f"{n_obs:,} cells, {embedding.coverage_frac:.1%} of counts on known genes -> {out}",
        f"{seconds:.1f} s, {n_obs / seconds:,.0f} cells/s, peak memory {peak_gb:.2f} GB",
        *describe_limits(embedding),
    ):
        print(f"{path.stem}: {line}")


def embed_external(*, name: str, command: str, input: Path, out: Path) -> None:
    """Write the embedding of the cells of `input` by `command` to `out` (.h5ad)."""
    check_h5ad(out, "--out")
    option = f"evaluate.external.{name}.command"
    model: ExternalModel = check_options(
        ExternalModel, {"command": command}, f"evaluate.external.{name}"
    )
    with open_dataset(input) as reader:
        obs = reader.obs
    out.parent.mkdir(parents=True, exist_ok=True)
    written = out.with_name(f".{out.stem}.{os.getpid()}.h5ad")
    started = time.perf_counter()
    folder = tempfile.TemporaryDirectory(prefix=f".{out.stem}.", dir=out.parent)
    words = command_words(command, str(plain_cells(input, Path(folder.name))), str(written))
    try:
        code = subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode
        if code:
            end = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
            remedy = ""
            if words[:2] == ["cellmill", "embed"]:  # of evaluate.external.NAME.model
                remedy = f"; for other options set {option} to {command!r} with them, and leave out model"
            raise DataError(f"{option}: it {end}; its last lines are above{remedy}")
        seconds = time.perf_counter() - started
        vectors = read_external(written, obs.index, option)
    except OSError as error:
        if error.filename != words[0]:
            raise
        raise ConfigError(
            f"{option}: {words[0]!r} cannot be run: {error.strerror}; name a program of PATH, or its path"
        ) from None
    finally:
        written.unlink(missing_ok=True)
        folder.cleanup()
    about = {"model_digest": model.command_digest, "command": command, "seconds": seconds}
    write_embedding(out, obs, vectors, about)
    print(
        f"{input.stem}: {name}: {len(obs):,} cells, {vectors.shape[1]:,} numbers each, {seconds:.1f} s -> {out}"
    )


def generate(
    *,
    model: Path,
    out: Path,
    cells: int,
    prompt: str,
    temperature: float,
    top_k: int,
    seed: int,
    max_genes: int,
    batch_cells: int,
) -> None:
    """Write `cells` generated cells to `out` (.h5ad).

    0 is no `top_k`, and `max_genes` of `tokens.max_tokens`.
    """
    check_h5ad(out, "--out")
    network, vocabulary, tokens, _ = load_for_inference(model)
    if not isinstance(network, AutoregressiveModel):
        raise ConfigError(
            f"{model}: expected a model that generates cells; train one of model.family autoregressive"
        )
    objective: Any = network.objective
    if tokens.value_kind in ("class", "scalar") and not objective.has_value_head:
        raise ConfigError(
            f"{model}: it does not predict the values that it reads; train it with objective.value_loss_weight above "
            "0, or with tokens.tokenizer rank"
        )
    prompt_rows = _rows_of(prompt, vocabulary)
    min_genes = max(1, len(prompt_rows))
    n_genes = max_genes or tokens.max_tokens
    for name, is_right, expected, got in (
        ("cells", cells >= 1, "at least 1", cells),
        ("top-k", top_k >= 0, "at least 0", top_k),
        ("batch-cells", batch_cells >= 1, "at least 1", batch_cells),
        ("seed", 0 <= seed < 2**31, f"0 to {2**31 - 1}", seed),
        ("temperature", 0 <= temperature < np.inf, "0 or more", f"{temperature:g}"),
        (
            "prompt",
            len(prompt_rows) <= tokens.max_tokens,
            f"at most {tokens.max_tokens} genes (tokens.max_tokens of the model)",
            len(prompt_rows),
        ),
        (
            "max-genes",
            min_genes <= n_genes <= tokens.max_tokens,
            f"{min_genes} (genes of --prompt) to {tokens.max_tokens} (tokens.max_tokens of the model)",
            max_genes,
        ),
    ):
        if not is_right:
            raise ConfigError(f"--{name}: expected {expected}, got {got}")
    sampling = Sampling(n_genes, temperature, top_k or None, seed, tuple(prompt_rows))
    about = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": vocabulary.digest,
        "tokenizer": tokens.tokenizer,
        "seed": seed,
        "temperature": temperature,
        "top_k": top_k,
        "max_genes": n_genes,
        "prompt": [vocabulary.gene_ids[row] for row in prompt_rows],
    }
    drawn: list[GeneratedCell] = []
    with create_h5(out) as file:  # a folder that cannot be written fails before cells are drawn
        for start in range(0, cells, batch_cells):
            batch = range(start, min(start + batch_cells, cells))
            drawn += generate_cells(network, sampling, batch)
        adata = _as_anndata(drawn, vocabulary, about)
        write_anndata(file, adata)
    print(f"{cells:,} cells, {adata.obs['n_genes'].median():g} genes at the median -> {out}")
    cut = int((~adata.obs["ended"]).sum())
    if cut:
        print(
            f"{cut:,} cells did not end and were cut at {min(n_genes, vocabulary.n_genes):,} genes"
        )


def _rows_of(prompt: str, vocabulary: Vocabulary) -> list[int]:
    """Rows of the vocabulary for the genes of `--prompt`, by id or symbol."""
    names = [*filter(None, map(str.strip, prompt.split(",")))]
    row_of_name = rows_of_known_genes(names, vocabulary, "--prompt")
    rows = [row_of_name[name] for name in names]
    for name, row in zip(names, rows):
        if rows.count(row) > 1:
            raise ConfigError(f"--prompt: {name!r} is there twice")
    return rows


def _as_anndata(
    cells: list[GeneratedCell], vocabulary: Vocabulary, about: dict[str, Any]
) -> ad.AnnData:
    """Cells x genes of the vocabulary; columns of a row are in the order of generation."""
    lengths = [len(cell.genes) for cell in cells]
    shape = len(cells), vocabulary.n_genes
    indptr = np.cumsum([0, *lengths])
    indices = np.concatenate([np.array(cell.genes, np.int32) for cell in cells])
    values = [np.ones(len(cell.genes)) if cell.values is None else cell.values for cell in cells]
    ranks = [np.arange(1, n + 1, dtype=np.int32) for n in lengths]
    x = sp.csr_matrix((np.concatenate(values).astype(np.float32), indices, indptr), shape=shape)
    rank = sp.csr_matrix((np.concatenate(ranks), indices, indptr), shape=shape)
    names = [f"generated{i}" for i in range(len(cells))]
    obs = pd.DataFrame({"n_genes": lengths, "ended": [cell.ended for cell in cells]}, index=names)
    var = pd.DataFrame({"symbol": vocabulary.symbols}, index=vocabulary.gene_ids)
    return ad.AnnData(x, obs, var, {"cellmill": about}, layers={"rank": rank})


def teach(*, manifest: Path, embeddings: list[Path], out: Path) -> None:
    """Write vectors of the cells that a training reads, from `embeddings` (DATASET.h5ad), to `out`."""
    shards = Manifest.read(manifest)
    names = []
    for split in TRAINING_SPLITS:
        for shard in shards.splits[split].shards:
            names.append(read_names(shards.shard_path(shard), "obs"))
    cells = pd.Index(np.concatenate(names))
    table = np.empty((len(cells), 0), np.float32)  # (cells, width): NaN without a vector
    models = set[str]()
    labels = set[str]()
    for path in embeddings:
        cell_names, vectors, about = read_vectors(path)
        if not models:  # the first gives the width
            table = np.full((len(cells), vectors.shape[1]), np.nan, np.float32)
        models.add(str(about.get("model_digest", "")))
        if len(models) > 1 or vectors.shape[1] != table.shape[1]:
            raise DataError(
                f"{path}: its vectors are of another model than {embeddings[0]}'s; embed both by one model"
            )
        labels |= {*filter(None, str(about.get("supervised_by", "")).split(", "))}
        rows = cells.get_indexer(f"{path.stem}:" + cell_names)  # -1 for cells that are not read
        table[rows[rows >= 0]] = vectors[rows >= 0]
    train = table[: shards.splits["train"].n_obs]
    width = table.shape[1]
    known = train[np.isfinite(train[:, 0])]
    if not len(known):
        raise DataError(
            f"{manifest}: no training cell has a vector in {embeddings[0]}; expected cells of these names"
        )
    if (known == known[0]).all():
        raise DataError(
            f"{embeddings[0]}: the vectors of all training cells are equal; embed them by another model"
        )
    out.mkdir(parents=True, exist_ok=True)
    std = known.std(0, dtype=np.float64)
    with new_array(out / TABLE, table.shape, "<f4") as array:
        array[:] = (table - known.mean(0, dtype=np.float64)) / np.where(std > 0, std, 1)
    about = {
        "width": width,
        "sha256": sha256_file(out / TABLE),
        "shards": shards.fingerprint,
        "model": models.pop(),
    }
    write_json(out / ABOUT, about | {"supervised_by": sorted(labels)})
    print(
        f"{len(known):,} of {len(train):,} training cells have a vector of {width:,} numbers -> {out}"
    )


def predict(
    *,
    options: PredictOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    append: bool = False,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write labels, probabilities and numbers of the cells of `input` to `out`.

    `input` and `append` as in `embed`.
    """
    path = check_input(input, out, append)
    loaded = load_for_inference(model)
    network, _, _, config = loaded
    smallest = choose_thresholds(network, config, options.predict, f"--model {model}")
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        embedding = embed_cells(reader, loaded, options.embed)
        seen = mark_seen_cells(reader, model)
        obs = reader.obs
        predicted = predict_heads(network, config, embedding, smallest, obs, seen)
    write_prediction(out, obs, predicted, path if append else None)
    lines = [f"{embedding.coverage_frac:.1%} of counts on known genes"]
    for end, (_, classifier) in find_classifiers(network, config).items():
        column = classifier["label_column"]
        common = Counter(predicted.obs[LABEL + end].dropna()).most_common(3)
        commonest = ", ".join(f"{label} {n:,}" for label, n in common) or "no label"
        rejected = "none rejected"
        if smallest[end]:
            n_rejected = predicted.about[f"n_rejected{end}"]
            below = f"below probability {smallest[end]:g}"
            rejected = f"{n_rejected:,} {below} rejected, without a label"
        lines.append(
            f"{len(obs):,} cells labelled by {column}, {rejected}; most as {commonest} -> {out}"
        )
        if not classifier["calibration"]:
            why = classifier.get("uncalibrated", NO_VALIDATION)
            lines.append(f"warning: probabilities are not calibrated: {why}")
        if column in obs and column != DATASET:
            label_counts = count_labels(obs, path.stem, column, classifier["labels"])
            if label_counts.problem:
                lines.append(f"warning: obs column {label_counts.problem}")
    lines += predicted.agreement
    numbers = [column for key, column in predicted.about.items() if key.startswith("value_column")]
    lines += [f"{len(obs):,} cells have a predicted {column} -> {out}" for column in numbers]
    for line in [*lines, *describe_limits(embedding)]:
        print(f"{path.stem}: {line}")
