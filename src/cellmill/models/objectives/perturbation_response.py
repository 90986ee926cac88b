"""perturbation_response: cell_decoding, with a response of the cell to its perturbation.

The decoder is given the cell's vector plus a response, as in CPA (Lotfollahi et al. 2023, Mol.
Syst. Biol. 19:e11517). The response is a sum of three terms: a linear map of the mean embedding of
the perturbed genes (rows of the decoder's output layer), a bias that all perturbations share, and a
learned vector per perturbation. Controls have no response. The learned vector of a perturbation
without training cells stays zero; its response is predicted from its genes. Counts are split into two
binomial parts: the cell's vector is computed from one, and with the response predicts the other.

Legend: C cells with targets, E width of a cell's vector, D input width of the decoder's output
layer, M largest number of genes of a perturbation, V size of the vocabulary. Level codes begin at 1;
0 is an unknown level.
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
    """Profiles to predict, and the perturbations of their cells."""

    perturbation_codes: Tensor  # `(C,)` int64: level codes
    is_perturbed: Tensor  # `(C,)` bool: False for controls
    padded_token_ids: Tensor  # `(C, M)` int64: token ids of perturbed genes, then `<pad>`


class PerturbationResponse(CellDecoding):
    """Predict hidden expression from the cell's vector plus a response to its perturbation."""

    config: PerturbationResponseConfig
    # set by `attach`
    _token_ids_by_code: list[Sequence[int]]  # token ids of perturbed genes by level code
    _control_code: int  # level code of controls

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        names = super().attach(model, vocab_size)
        config = self.config
        width = model.vector_width
        levels = self.levels[config.perturbation_column]
        n_known = len(self.known_levels(config.perturbation_column))
        # the names are those of checkpoints. A linear layer from the mean embedding of the perturbed
        # genes (width D) to a term of the response (width E): zero at the start. Its bias is the term
        # that all perturbations share
        model.response_genes = with_std(nn.Linear(config.decoder_hidden or width, width), 0.0)
        # the learned vector (width E) of each perturbation
        model.response_terms = LevelEmbedding(len(levels), n_known, width, is_centred=False)
        model.add_level_rows(config.perturbation_column, "response_terms.weight")
        genes = config.perturbed_genes or {}
        self._token_ids_by_code = [[], *(genes.get(level, []) for level in levels)]
        self._control_code = _find_level_code(config.control, levels)
        return (*names, "response_genes", "response_terms")

    def prepare(self, batch: Batch, *, seed: int, step: int) -> ResponseBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        codes = self.level_codes(batch, self.config.perturbation_column)  # `(cells,)`
        # cells of an unknown perturbation are not predicted
        is_predicted = (codes > 0)[batch.entry_cells]  # `(entries,)`
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
        """Compute the decoder's features `(C, D)` from `vectors` `(C, E)` plus each cell's response."""
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
        """Predict the log fraction of each gene in a cell of an average experimental batch.

        The result is `(C, n_genes)` float32, over all genes of the vocabulary.

        - `vectors`, `(C, E)`: the cells, before the perturbation
        - `perturbation`: a level of the column or an unknown name, not the control; None for no perturbation
        - `perturbed_token_ids`: the token ids of the perturbation's genes, possibly none
        """
        if perturbation is not None:
            levels = self.levels[self.config.perturbation_column]
            device = vectors.device
            # 0 if the column has no such level: only its genes and the shared bias respond
            codes = torch.tensor([_find_level_code(perturbation, levels)], device=device)
            padded_token_ids = _pad_token_ids([perturbed_token_ids]).to(device)
            vectors = vectors + _compute_response(model, codes, padded_token_ids)
        # the vectors of experimental batches are centred: an average batch adds 0
        features = model.decoder(vectors)
        logits = token_logits(features, model.profile_genes.weight, model.profile_bias)
        return logits[:, len(SPECIAL) :].float().log_softmax(1)

    def judged_labels(self) -> dict[str, list[str]]:
        column = self.config.perturbation_column
        return {column: self.known_levels(column)}

    def list_trained_levels(self, model: ObjectiveModel) -> list[str]:
        """List the perturbations whose learned vector is not zero, in the order of their codes.

        They have training cells, here or in an earlier run that `init_from` read.
        """
        levels = self.known_levels(self.config.perturbation_column)
        norms = model.response_terms.weight.abs().sum(1).tolist()
        return [
            level for level, norm in zip(levels, norms) if norm and level != self.config.control
        ]


def _find_level_code(level: str, levels: Sequence[str]) -> int:
    """Find the level code of `level` among `levels`, from 1; 0 for an unknown level."""
    return 1 + levels.index(level) if level in levels else 0


def _compute_response(model: ObjectiveModel, codes: Tensor, padded_token_ids: Tensor) -> Tensor:
    """Compute what its perturbation adds to each cell's vector, `(C, E)`.

    `codes` and `padded_token_ids` are `perturbation_codes` and `padded_token_ids` of a `ResponseBatch`.
    """
    flat = embed_tokens(padded_token_ids.flatten(), model.profile_genes.weight)
    embedded = flat.unflatten(0, padded_token_ids.shape)  # `(C, M, D)`
    is_gene = (padded_token_ids != PAD_TOKEN)[..., None]  # `(C, M, 1)`
    n_genes = is_gene.sum(1).clamp(min=1)
    mean = (embedded * is_gene).sum(1) / n_genes  # `(C, D)`
    term_of_genes = model.response_genes(mean.to(embedded.dtype))
    response: Tensor = term_of_genes + model.response_terms(codes)
    return response


def _pad_token_ids(token_ids_by_cell: list[Sequence[int]]) -> Tensor:
    """Pad the token ids of each cell with `<pad>`: `(C, M)` int64, with M of at least 1."""
    lengths = [len(token_ids) for token_ids in token_ids_by_cell]
    padded = torch.full((len(token_ids_by_cell), max([1, *lengths])), PAD_TOKEN)
    for row, token_ids in zip(padded, token_ids_by_cell):
        row[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
    return padded
