"""Hidden genes predicted by the decoder of a model.

An objective that decodes the vector of a cell predicts from it (`cell_decoding`, `query_decoding`).
`masked_value` predicts tokens of the hidden genes, which are added to the tokens of visible genes.

Legend: C cells, V genes of the vocabulary, G hidden genes, H hidden width.
"""

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import TARGET_SUM
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.micro_batches import split_batch
from cellmill.evaluate.features.expression import expected_log_expression
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.inference.embed import check_heads, inference_mode
from cellmill.models.batch import PAD_TOKEN, add_tokens, to_tensors
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.masked_value import MaskedValue
from cellmill.models.objectives.query_decoding import QueryDecoding
from cellmill.models.objectives.shared.masking import MaskedBatch
from cellmill.parallel.vocab_parallel import token_logits

DECODED_CELLS = 256  # cells whose profiles are decoded at once
QUERIED_CELLS = 32  # cells that are queried at once
# hidden genes that masked_value predicts in one pass: about the share of a cell that training masks
MASKED_GENES = 64
MASKED_TOKENS = 16_384  # tokens of visible genes in such a pass


def decode_expression(cells: PartlyHiddenCells, vectors: np.ndarray) -> np.ndarray | None:
    """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, predicted by the model. `vectors`,
    (C, H), are the embeddings of the visible genes, which some objectives decode.

    None for a model that predicts no expression.
    """
    objective = find_decoding_objective(cells.network)
    with inference_mode(cells.device, cells.precision):
        if isinstance(objective, CellDecoding):
            return _decode_profiles(cells, vectors, objective)
        if isinstance(objective, QueryDecoding):
            return _query_genes(cells, vectors, objective)
        if isinstance(objective, MaskedValue):
            return _predict_masked(cells, objective)
    return None


def find_decoding_objective(network: Model) -> CellDecoding | QueryDecoding | MaskedValue | None:
    """The objective, or the part of a sum, that predicts expression; None without one.

    Raises ConfigError as `check_heads`.
    """
    objective = network.objective
    for part in objective.parts_by_name().values():
        if isinstance(part, CellDecoding | QueryDecoding):
            check_heads(network)
            return part
    # not a part of a sum, because a sum may draw a view of the cell
    if isinstance(objective, MaskedValue) and objective.tokens.value_kind == "scalar":
        return objective
    return None


def _decode_profiles(
    cells: PartlyHiddenCells, vectors: np.ndarray, objective: CellDecoding
) -> np.ndarray:
    """(C, G) float32: expression from the profile that the decoder predicts for each vector."""
    network = cells.network
    device = cells.device
    genes = cells.visible_and_hidden_genes
    hidden_columns = np.searchsorted(genes, cells.hidden_genes)
    tokens = torch.from_numpy(genes + len(SPECIAL)).to(device)
    visible = cells.visible_counts
    blocks = []
    for block_start in range(0, len(vectors), DECODED_CELLS):
        block = slice(block_start, block_start + DECODED_CELLS)
        predicted = network.decoder(torch.from_numpy(vectors[block]).to(device))
        logits = token_logits(predicted, network.profile_genes.weight, network.profile_bias)
        # shares of the visible and hidden genes sum to 1
        shares = logits[:, tokens].double().softmax(1)
        hidden_shares = shares.cpu().numpy()[:, hidden_columns]
        if objective.predicts_log_counts:
            blocks.append(expression_from_log_shares(hidden_shares, visible[block]))
        else:
            blocks.append(expression_from_count_shares(hidden_shares, visible[block]))
    return np.concatenate(blocks).astype(np.float32)


def expression_from_count_shares(shares: np.ndarray, visible: sp.csr_matrix) -> np.ndarray:
    """(C, G) float64: expected log(1 + counts per 10,000) of hidden genes whose counts are Poisson.

    `shares`, (C, G), are their predicted shares of a cell's counts. The `visible` counts, (C, V), are
    the rest of these.
    """
    visible_share = np.maximum(1 - shares.sum(1), 1e-9)
    visible_depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    counts = shares * (visible_depth / visible_share)[:, None]
    depth = visible_depth + counts.sum(1)
    shares_of_all = counts / np.maximum(depth, 1e-9)[:, None]
    # the logarithm of an expectation would be far larger
    return expected_log_expression(shares_of_all, depth)


def expression_from_log_shares(shares: np.ndarray, visible: sp.csr_matrix) -> np.ndarray:
    """(C, G) float64: log(1 + counts per 10,000) of hidden genes.

    `shares`, (C, G), are their predicted shares of the sum of a cell's log(1 + count). The genes with
    the `visible` counts, (C, V), have the rest. The shares are used as shares of the sum of
    log(1 + counts per 10,000), so a cell's depth enters through the visible genes only.
    """
    visible_share = np.maximum(1 - shares.sum(1), 1e-9)
    visible_depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    per_count = TARGET_SUM * visible_share / np.maximum(visible_depth, 1e-9)
    logs = visible.multiply(per_count[:, None]).tocsr().log1p()
    log_sum = np.asarray(logs.sum(axis=1)).ravel()
    return np.asarray(shares * (log_sum / visible_share)[:, None])


def _query_genes(
    cells: PartlyHiddenCells, vectors: np.ndarray, objective: QueryDecoding
) -> np.ndarray:
    """(C, G) float32: expression that the decoder predicts for a query of each hidden gene."""
    network = cells.network
    device = cells.device
    genes = torch.from_numpy(cells.hidden_genes + len(SPECIAL)).to(device)
    blocks = []
    for block in torch.from_numpy(vectors).split(QUERIED_CELLS):
        # (cells * G,): cell and gene of each query
        n_cells = len(block)
        cell = torch.arange(n_cells, device=device).repeat_interleave(len(genes))
        gene = genes.repeat(n_cells)
        answers = objective.predict_queries(network, block.to(device), cell, gene)
        by_cell = answers.view(n_cells, len(genes))
        blocks.append(by_cell.cpu().numpy())
    return np.maximum(np.concatenate(blocks), 0)


def _predict_masked(cells: PartlyHiddenCells, objective: MaskedValue) -> np.ndarray:
    """(C, G) float32: expression of masked tokens that are added to the visible tokens."""
    network = cells.network
    device = cells.device
    genes = torch.from_numpy(cells.hidden_genes + len(SPECIAL))
    n_cells = cells.counts.shape[0]
    values = np.zeros((n_cells, len(genes)), np.float32)
    for batch in cells.tokenize():
        for micro_batch in split_batch(batch, MASKED_TOKENS):
            tensors = to_tensors(micro_batch, device)
            for first in range(0, len(genes), MASKED_GENES):
                chosen = slice(first, first + MASKED_GENES)
                masked = _add_masked(network, tensors, genes[chosen].to(device))
                states = network.head(network.states(masked)[masked.target_tokens])
                predicted = objective.predict_from_head(network, states, masked).float()
                by_cell = predicted.view(len(micro_batch.cell_ids), -1)
                values[micro_batch.cell_ids, chosen] = by_cell.cpu().numpy()
    return np.maximum(values, 0)


def _add_masked(network: Model, batch: Batch, genes: torch.Tensor) -> MaskedBatch:
    """The cells with tokens of `genes`, which no cell has, after their own tokens; the values of
    the added tokens are hidden.
    """
    n_genes = len(genes)
    extended = add_tokens(batch, 0, n_genes, PAD_TOKEN)
    # positions of the added tokens: the last of each cell
    ends = extended.cu_seqlens[1:, None].long()
    positions = ends - n_genes + torch.arange(n_genes, device=ends.device)
    genes_of_cells = genes.repeat(len(batch.lengths))
    tokens = extended.token_ids.index_copy(0, positions.flatten(), genes_of_cells)
    # the view adds the family's own tokens
    view = network.view(replace(extended, token_ids=tokens), seed=0, step=0)
    is_added = torch.isin(view.token_ids, genes)
    target_tokens = is_added.nonzero().flatten()
    return MaskedBatch.from_batch(
        view,
        value_hidden=is_added,
        target_tokens=target_tokens,
        targets=view.values[target_tokens],
        n_targets=torch.tensor(len(target_tokens)),
    )
