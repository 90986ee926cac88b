"""generate: cells drawn from an exported model of family `autoregressive`, as an .h5ad.

A row of X has the cell's genes in the order in which they were drawn, as in the shards; layer `rank` has the same order
as numbers from 1, for tools that sort columns. X holds log(1 + counts per 10,000) as predicted (tokenizer continuous),
drawn bins (binned), or 1 (tokenizers without values).
"""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.tokens import Tokens
from cellmill.data.counts_writer import write_anndata
from cellmill.data.h5_file import check_h5ad, create_h5
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import ConfigError, did_you_mean
from cellmill.evaluate.embed import load_for_inference
from cellmill.files import sha256_file
from cellmill.models.autoregressive.causal_transformer import AutoregressiveModel
from cellmill.models.autoregressive.generation import GeneratedCell, Sampling, generate_cells
from cellmill.models.family import Model


def run(
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
    """Write `cells` generated cells to `out` (.h5ad). `prompt` has genes, ids or symbols, separated by commas.

    0 is no `top_k`, and `max_genes` of the model's `tokens.max_tokens`.
    """
    check_h5ad(out, "--out")
    network, vocabulary, tokens, _ = load_for_inference(model)
    generator = _checked(network, tokens, model)
    for name, value, least in (("cells", cells, 1), ("top-k", top_k, 0), ("batch-cells", batch_cells, 1)):
        if value < least:
            raise ConfigError(f"--{name}: expected at least {least}, got {value}")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"--seed: expected 0 to {2**31 - 1}, got {seed}")
    if not 0 <= temperature < np.inf:
        raise ConfigError(f"--temperature: expected 0 or more, got {temperature:g}")
    first = prompt_rows(prompt, vocabulary)
    if len(first) > tokens.max_tokens:
        raise ConfigError(
            f"--prompt: expected at most {tokens.max_tokens} genes (tokens.max_tokens of the model), got {len(first)}"
        )
    if not max(1, len(first)) <= (max_genes or tokens.max_tokens) <= tokens.max_tokens:
        raise ConfigError(
            f"--max-genes: expected {max(1, len(first))} (genes of --prompt) to {tokens.max_tokens} "
            f"(tokens.max_tokens of the model), got {max_genes or tokens.max_tokens}"
        )
    sampling = Sampling(max_genes or tokens.max_tokens, temperature, top_k or None, seed, first)
    about = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": vocabulary.digest,
        "tokenizer": tokens.tokenizer,
        "seed": seed,
        "temperature": temperature,
        "top_k": top_k,
        "max_genes": sampling.max_genes,
        "prompt": [vocabulary.gene_ids[row] for row in first],
    }
    drawn: list[GeneratedCell] = []
    with create_h5(out) as file:  # a folder that cannot be written is said before cells are drawn
        for start in range(0, cells, batch_cells):
            drawn += generate_cells(generator, sampling, range(start, min(start + batch_cells, cells)))
        adata = as_anndata(drawn, vocabulary, about)
        write_anndata(file, adata)
    print(f"{cells:,} cells, {adata.obs['n_genes'].median():g} genes at the median -> {out}")
    if cut := int((~adata.obs["ended"]).sum()):
        print(f"{cut:,} cells did not end and were cut at {min(sampling.max_genes, vocabulary.n_genes):,} genes")


def _checked(network: Model, tokens: Tokens, folder: Path) -> AutoregressiveModel:
    if not isinstance(network, AutoregressiveModel):
        raise ConfigError(f"{folder}: expected a model that generates cells; train one of model.family autoregressive")
    objective: Any = network.objective
    if tokens.value_kind in ("class", "scalar") and not objective.predicts_values:
        raise ConfigError(
            f"{folder}: it does not predict the values that it reads; train it with objective.value_loss_weight above "
            "0, or with tokens.tokenizer rank"
        )
    return network


def prompt_rows(prompt: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Vocabulary rows of genes, by id or symbol. Raises ConfigError for an unknown gene, or one that is there twice."""
    rows: dict[int, str] = {}
    known = {name: row for names in (vocabulary.symbols, vocabulary.gene_ids) for row, name in enumerate(names)}
    for name in filter(None, map(str.strip, prompt.split(","))):
        if name not in known:
            raise ConfigError(f"--prompt: {name!r} is not in the model's vocabulary; {did_you_mean(name, known)}")
        if known[name] in rows:
            raise ConfigError(f"--prompt: {name!r} is there twice")
        rows[known[name]] = name
    return tuple(rows)


def as_anndata(cells: list[GeneratedCell], vocabulary: Vocabulary, about: dict[str, Any]) -> ad.AnnData:
    """Cells x genes of the vocabulary; columns of a row are in the order of generation."""
    indptr = np.cumsum([0, *(len(cell.genes) for cell in cells)])
    indices = np.concatenate([np.array(cell.genes, np.int32) for cell in cells])
    data = np.concatenate([np.ones(len(c.genes)) if c.values is None else c.values for c in cells]).astype(np.float32)
    rank = np.concatenate([np.arange(1, len(cell.genes) + 1, dtype=np.int32) for cell in cells])
    shape = (len(cells), vocabulary.n_genes)
    lengths, ended = np.diff(indptr), [cell.ended for cell in cells]
    obs = pd.DataFrame({"n_genes": lengths, "ended": ended}, index=[f"generated{i}" for i in range(len(cells))])
    var = pd.DataFrame({"symbol": vocabulary.symbols}, index=vocabulary.gene_ids)
    layers = {"rank": sp.csr_matrix((rank, indices, indptr), shape=shape)}
    return ad.AnnData(sp.csr_matrix((data, indices, indptr), shape=shape), obs, var, {"cellmill": about}, layers=layers)
