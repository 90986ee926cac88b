"""perturbation_response: cell_decoding, with a response of the cell to the cell's perturbation.

Counts are split into two binomial parts. The cell's vector is computed from one part. The decoder predicts
the other part from the sum of this vector and the response, as in CPA (Lotfollahi et al. 2023, Mol. Syst.
Biol. 19:e11517). The response is a sum of three terms:

- a linear map of the mean embedding of the perturbed genes. The embedding of a gene is its row of the
  decoder's output layer
- a bias, which all perturbations share
- a learned vector of the perturbation

Controls have no response. If a perturbation has no training cells, its learned vector stays zero, and its
response comes from its genes and the bias.

Level codes begin at 1, and 0 is an unknown level. In the shapes below, "target cells" are the cells with
something to predict, "vector width" is the width of a cell's vector, "feature width" is the input width of
the decoder's output layer, and "max genes" is the largest number of perturbed genes of any cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cellmill.config.parts.objectives import PerturbationResponseConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN
from cellmill.models.initial import with_std
from cellmill.models.objective import ObjectiveModel
from cellmill.models.objectives.cell_decoding import CellDecoding, DecodingBatch
from cellmill.models.objectives.shared.level_modules import LevelEmbedding
from cellmill.models.objectives.shared.views import ViewBatch
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits


@dataclass(frozen=True, kw_only=True)
class ResponseBatch(DecodingBatch):
    """The profiles to predict, and the perturbation of each target cell."""

    perturbation_codes: Tensor  # (target cells,) int64: level codes
    is_perturbed: Tensor  # (target cells,) bool: False for controls
    padded_token_ids: Tensor
    """(target cells, max genes) int64: the token ids of the perturbed genes, followed by `<pad>`."""


class PerturbationResponse(CellDecoding):
    """Predict hidden expression from the cell's vector plus a response to its perturbation."""

    config: PerturbationResponseConfig
    # `attach` sets these two
    _token_ids_by_code: list[Sequence[int]]  # the token ids of the perturbed genes, by level code
    _control_code: int  # the level code of controls

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        names = super().attach(model, vocab_size)
        config = self.config
        vector_width = model.vector_width
        feature_width = config.decoder_hidden or vector_width
        levels = self.levels[config.perturbation_column]
        n_known = len(self.known_levels(config.perturbation_column))

        # The two modules have the names that checkpoints have. `response_genes` maps the mean embedding of
        # the perturbed genes to a term of the response. Its weight starts at 0, and its bias is the term
        # that all perturbations share
        model.response_genes = with_std(nn.Linear(feature_width, vector_width), 0.0)
        # `response_terms` has the learned vector of each perturbation
        model.response_terms = LevelEmbedding(len(levels), n_known, vector_width, is_centred=False)
        model.add_level_rows(config.perturbation_column, "response_terms.weight")

        genes_by_level = config.perturbed_genes or {}
        # code 0, an unknown level, has no known genes
        self._token_ids_by_code = [[], *(genes_by_level.get(level, []) for level in levels)]
        self._control_code = _find_level_code(config.control, levels)
        return (*names, "response_genes", "response_terms")

    def prepare(self, batch: Batch, *, seed: int, step: int) -> ResponseBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        codes = self.level_codes(batch, self.config.perturbation_column)  # (cells,)

        # cells with an unknown perturbation are not predicted, so their entries are left out
        is_predicted = (codes > 0)[batch.entry_cells]  # (entries,)
        batch = replace(
            batch,
            entry_cells=batch.entry_cells[is_predicted],
            entry_token_ids=batch.entry_token_ids[is_predicted],
            entry_counts=batch.entry_counts[is_predicted],
        )
        prepared = super().prepare(batch, seed=seed, step=step)

        target_codes = codes[prepared.target_cells]
        return ResponseBatch.extend(
            prepared,
            perturbation_codes=target_codes,
            is_perturbed=target_codes != self._control_code,
            padded_token_ids=_pad_token_ids(
                [self._token_ids_by_code[code] for code in target_codes.tolist()]
            ),
        )

    def decoder_features(
        self, model: ObjectiveModel, vectors: Tensor, prepared: DecodingBatch
    ) -> Tensor:
        """Compute the input of the decoder's output layer, (target cells, feature width).

        The features come from the sum of `vectors` (target cells, vector width) and the response of each
        cell.
        """
        assert isinstance(prepared, ResponseBatch), "expected a batch with perturbations"
        response = _compute_response(model, prepared.perturbation_codes, prepared.padded_token_ids)
        perturbed = vectors + response * prepared.is_perturbed[:, None]
        return super().decoder_features(model, perturbed.to(vectors.dtype), prepared)

    def predict_log_profile(
        self,
        model: ObjectiveModel,
        vectors: Tensor,
        perturbation: str | None,
        perturbed_token_ids: list[int],
    ) -> Tensor:
        """Predict the logarithm of each gene's fraction of a cell's expression, after a perturbation.

        The result is (cells, genes) float32, with all genes of the vocabulary. The prediction is for an
        average experimental batch.

        - `vectors` (cells, vector width) are the vectors of the cells before the perturbation.
        - `perturbation` is a level of the column, but not the control, or a name that the column does not
          have. None means no perturbation.
        - `perturbed_token_ids` are the token ids of the perturbed genes. There may be none.
        """
        if perturbation is not None:
            levels = self.levels[self.config.perturbation_column]
            device = vectors.device
            # The code is 0 if the column does not have this level. The learned vector is then zero, and
            # the response comes from the perturbed genes and the shared bias
            codes = torch.tensor([_find_level_code(perturbation, levels)], device=device)
            padded_token_ids = _pad_token_ids([perturbed_token_ids]).to(device)
            vectors = vectors + _compute_response(model, codes, padded_token_ids)
        # the mean vector of experimental batches is 0, so nothing is added for an average batch
        features = model.decoder(vectors)
        logits = token_logits(features, model.profile_genes.weight, model.profile_bias)
        return logits[:, len(SPECIAL) :].float().log_softmax(1)

    def judged_labels(self) -> dict[str, list[str]]:
        column = self.config.perturbation_column
        return {column: self.known_levels(column)}

    def list_trained_levels(self, model: ObjectiveModel) -> list[str]:
        """List the perturbations with a learned vector other than zero, in the order of their codes.

        These perturbations have training cells in this run, or in an earlier run that `init_from` read.
        """
        levels = self.known_levels(self.config.perturbation_column)
        norms = model.response_terms.weight.abs().sum(1).tolist()
        return [
            level for level, norm in zip(levels, norms) if norm and level != self.config.control
        ]


def _find_level_code(level: str, levels: Sequence[str]) -> int:
    """Return the level code of `level`, which is its index in `levels` plus 1; 0 for an unknown level."""
    return 1 + levels.index(level) if level in levels else 0


def _compute_response(model: ObjectiveModel, codes: Tensor, padded_token_ids: Tensor) -> Tensor:
    """Compute the response of each cell to its perturbation, (cells, vector width).

    `codes` (cells,) int64 are the level codes of the perturbations. `padded_token_ids` (cells, max genes)
    int64 are the token ids of the perturbed genes of each cell, followed by `<pad>`.
    """
    # the mean embedding of the perturbed genes; zero if no gene is known
    flat_embeddings = embed_tokens(padded_token_ids.flatten(), model.profile_genes.weight)
    # (cells, max genes, feature width)
    embeddings = flat_embeddings.unflatten(0, padded_token_ids.shape)
    is_gene = (padded_token_ids != PAD_TOKEN)[..., None]  # (cells, max genes, 1)
    n_genes = is_gene.sum(1).clamp(min=1)
    mean_embedding = (embeddings * is_gene).sum(1) / n_genes  # (cells, feature width)

    # the bias of `response_genes` is the term that all perturbations share
    term_of_genes_and_bias = model.response_genes(mean_embedding.to(embeddings.dtype))
    response: Tensor = term_of_genes_and_bias + model.response_terms(codes)
    return response


def _pad_token_ids(token_ids_by_cell: list[Sequence[int]]) -> Tensor:
    """Pad the token ids of each cell with `<pad>`, (cells, max genes) int64, with at least one column."""
    lengths = [len(token_ids) for token_ids in token_ids_by_cell]
    padded = torch.full((len(token_ids_by_cell), max([1, *lengths])), PAD_TOKEN)
    for row, token_ids in zip(padded, token_ids_by_cell):
        row[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
    return padded
