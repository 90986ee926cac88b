"""Prediction of hidden genes by the decoder of a model.

Objectives `cell_decoding` and `query_decoding` predict the hidden genes from the vector of a cell.
Objective `masked_value` predicts from tokens: a masked token of each hidden gene is added to the tokens
of the visible genes.

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

DECODED_CELLS = 256  # at most this many cells are decoded at once by cell_decoding
QUERIED_CELLS = 32  # at most this many cells are decoded at once by query_decoding
# masked_value predicts at most this many hidden genes in one pass. Training masks a similar number of
# genes of a cell.
MASKED_GENES = 64
MIN_SUM = 1e-9  # shares and depths that divide are at least this, so that no division is by 0


def decode_expression(cells: PartlyHiddenCells, vectors: np.ndarray) -> np.ndarray | None:
    """Predict log(1 + counts per 10,000) of the hidden genes, (C, G) float32.

    `vectors`, (C, H), are the embeddings of the visible part of the cells. Some objectives decode them.
    Returns None for a model that predicts no expression.
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
    """Return the objective, or the part of a sum, that predicts expression; None if there is none.

    Raises ConfigError if the decoder would get vectors of another block than in training.
    """
    objective = network.objective
    for part in objective.parts_by_name().values():
        if isinstance(part, CellDecoding | QueryDecoding):
            check_heads(network)
            return part
    # masked_value as a part of a sum is not used, because the sum may show it only a view of the cell
    if isinstance(objective, MaskedValue) and objective.tokens.value_kind == "scalar":
        return objective
    return None


def _decode_profiles(
    cells: PartlyHiddenCells, vectors: np.ndarray, objective: CellDecoding
) -> np.ndarray:
    """Predict the expression of the hidden genes, (C, G) float32, from a profile decoded from each vector."""
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
        # the shares of the visible and hidden genes together sum to 1
        shares = logits[:, tokens].double().softmax(1)
        hidden_shares = shares.cpu().numpy()[:, hidden_columns]
        if objective.predicts_log_counts:
            blocks.append(expression_from_log_shares(hidden_shares, visible[block]))
        else:
            blocks.append(expression_from_count_shares(hidden_shares, visible[block]))
    return np.concatenate(blocks).astype(np.float32)


def expression_from_count_shares(shares: np.ndarray, visible: sp.csr_matrix) -> np.ndarray:
    """Expected log(1 + counts per 10,000) of the hidden genes, (C, G) float64.

    `shares`, (C, G), are the predicted shares of the hidden genes in all counts of a cell. `visible`, (C,
    V), has the counts of the visible genes, which have the rest of the shares. The count of a hidden gene
    is taken to be Poisson distributed.
    """
    visible_share = np.maximum(1 - shares.sum(1), MIN_SUM)
    visible_depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    # expected counts of the hidden genes, if the visible share has the visible counts
    counts = shares * (visible_depth / visible_share)[:, None]
    depth = visible_depth + counts.sum(1)
    shares_of_all = counts / np.maximum(depth, MIN_SUM)[:, None]
    # not the logarithm of the expected count, which would be far larger
    return expected_log_expression(shares_of_all, depth)


def expression_from_log_shares(shares: np.ndarray, visible: sp.csr_matrix) -> np.ndarray:
    """Predicted log(1 + counts per 10,000) of the hidden genes, (C, G) float64.

    `shares`, (C, G), are the predicted shares of the hidden genes in the sum of a cell's log(1 + count).
    `visible`, (C, V), has the counts of the visible genes, which have the rest of the shares.

    Training measures shares of log(1 + count). Here they are used as shares of the sum of
    log(1 + counts per 10,000). So the depth of a cell enters through the visible genes only.
    """
    visible_share = np.maximum(1 - shares.sum(1), MIN_SUM)
    visible_depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    # scale the counts so that the visible genes have their share of 10,000
    per_count = TARGET_SUM * visible_share / np.maximum(visible_depth, MIN_SUM)
    logs = visible.multiply(per_count[:, None]).tocsr().log1p()
    # the sum over all genes is the visible sum divided by the visible share
    log_sum = np.asarray(logs.sum(axis=1)).ravel()
    return np.asarray(shares * (log_sum / visible_share)[:, None])


def _query_genes(
    cells: PartlyHiddenCells, vectors: np.ndarray, objective: QueryDecoding
) -> np.ndarray:
    """Predict the expression of the hidden genes, (C, G) float32, by a query of each cell and gene."""
    network = cells.network
    device = cells.device
    hidden_tokens = torch.from_numpy(cells.hidden_genes + len(SPECIAL)).to(device)
    n_genes = len(hidden_tokens)
    blocks = []
    for block in torch.from_numpy(vectors).split(QUERIED_CELLS):
        # cell and token of each query, (cells of the block * G,)
        n_cells = len(block)
        cell = torch.arange(n_cells, device=device).repeat_interleave(n_genes)
        token = hidden_tokens.repeat(n_cells)
        answers = objective.predict_queries(network, block.to(device), cell, token)
        by_cell = answers.view(n_cells, n_genes)
        blocks.append(by_cell.cpu().numpy())
    return np.maximum(np.concatenate(blocks), 0)


def _predict_masked(cells: PartlyHiddenCells, objective: MaskedValue) -> np.ndarray:
    """Predict the expression of the hidden genes, (C, G) float32, by masked tokens.

    A cell without a visible token has 0.
    """
    network = cells.network
    device = cells.device
    hidden_tokens = torch.from_numpy(cells.hidden_genes + len(SPECIAL))
    n_cells = cells.counts.shape[0]
    values = np.zeros((n_cells, len(hidden_tokens)), np.float32)
    for batch in cells.tokenize():
        for micro_batch in split_batch(batch, cells.token_budget):
            tensors = to_tensors(micro_batch, device)
            # predict the hidden genes MASKED_GENES at a time
            for first in range(0, len(hidden_tokens), MASKED_GENES):
                chosen = slice(first, first + MASKED_GENES)
                masked = _add_masked(network, tensors, hidden_tokens[chosen].to(device))
                states = network.head(network.states(masked)[masked.target_tokens])
                predicted = objective.predict_from_head(network, states, masked).float()
                by_cell = predicted.view(len(micro_batch.cell_ids), -1)
                values[micro_batch.cell_ids, chosen] = by_cell.cpu().numpy()
    return np.maximum(values, 0)


def _add_masked(network: Model, batch: Batch, added: torch.Tensor) -> MaskedBatch:
    """Add the tokens `added` to the end of every cell, and hide the values of these tokens.

    `added`, (added tokens,), are token ids. No cell may have any of these tokens before.
    """
    n_added = len(added)
    extended = add_tokens(batch, 0, n_added, PAD_TOKEN)
    # positions of the added tokens, (cells, added tokens): the last tokens of each cell
    ends = extended.cu_seqlens[1:, None].long()
    positions = ends - n_added + torch.arange(n_added, device=ends.device)
    added_to_cells = added.repeat(len(batch.lengths))
    token_ids = extended.token_ids.index_copy(0, positions.flatten(), added_to_cells)
    # the view adds tokens that the model's family needs, so the positions have changed
    view = network.view(replace(extended, token_ids=token_ids), seed=0, step=0)
    is_added = torch.isin(view.token_ids, added)
    target_tokens = is_added.nonzero().flatten()
    return MaskedBatch.from_batch(
        view,
        value_hidden=is_added,
        target_tokens=target_tokens,
        targets=view.values[target_tokens],
        n_targets=torch.tensor(len(target_tokens)),
    )
