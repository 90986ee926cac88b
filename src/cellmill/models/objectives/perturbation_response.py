"""perturbation_response: expression given a cell and a perturbation.

As cell_decoding, but the decoder is given the cell's vector plus a response to its perturbation, as in CPA (Lotfollahi
et al. 2023, Mol. Syst. Biol. 19:e11517): a projection of what the decoder knows of the perturbed genes, a bias that all
perturbations share, and a learned vector of each perturbation. Controls have no response. A perturbation that was not
trained on has the first two, so it can be predicted if its gene is known; its learned vector stays zero.

A predicted change is the profile of one control cell with a response minus the profile without. The loss is of binomial
draws: the response has to explain the part of the counts that the cell's vector, made from the other part, does not.

Legend: C cells with targets, H width of a cell's vector, D width of the decoder's last layer, M most genes of a
perturbation, V tokens of the vocabulary.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from cellmill.config.parts.objectives import PerturbationResponseConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.shards.index import MISSING
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN
from cellmill.models.initial import with_std
from cellmill.models.objectives.cell_decoding import CellDecoding, DecodingBatch
from cellmill.models.objectives.terms import LevelTerms
from cellmill.models.objectives.views import ViewBatch
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits


@dataclass(frozen=True, kw_only=True)
class ResponseBatch(DecodingBatch):
    """Profiles to predict, and the perturbations of their cells."""

    perturbation: torch.Tensor  # (C,) int64: number of the level; 0 for controls
    perturbed: torch.Tensor  # (C, M) int64: token ids of perturbed genes, `<pad>` behind them


class PerturbationResponse(CellDecoding):
    """See the module; needs a model with `cell_vectors`."""

    config: PerturbationResponseConfig

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        names = super().attach(model, n_tokens)
        levels, known = self.levels[self.config.perturbation_column], self.config.perturbed_genes or {}
        width = self.config.decoder_hidden or model.vector_width
        model.response_genes = with_std(nn.Linear(width, model.vector_width), 0.0)  # no response at the start
        model.response_terms = LevelTerms(len(levels), model.vector_width, centered=False)
        rows = {"response_terms.weight": self.config.perturbation_column}
        model.level_rows = {**model.level_rows, **rows}
        self._genes = [[], *(known.get(level, []) for level in levels)]
        self._excluded = {0, *(number for number, level in enumerate(levels, start=1) if level == MISSING)}
        self._control = 1 + levels.index(self.config.control) if self.config.control in levels else 0
        return (*names, "response_genes", "response_terms")

    def prepare(self, batch: Batch, *, seed: int, step: int) -> ResponseBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        numbers = self.level_numbers(batch, self.config.perturbation_column)
        known = ~torch.isin(numbers, torch.tensor([*self._excluded]))[batch.profile_cell]
        parts = {name: getattr(batch, name)[known] for name in ("profile_cell", "profile_gene", "profile_count")}
        prepared = super().prepare(replace(batch, **parts), seed=seed, step=step)
        perturbation = numbers[prepared.target_cells]
        return ResponseBatch(
            **{field.name: getattr(prepared, field.name) for field in fields(prepared)},
            perturbation=torch.where(perturbation == self._control, 0, perturbation),
            perturbed=_padded([self._genes[number] for number in perturbation.tolist()]),
        )

    def _decoded(self, model: Any, vectors: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """(C, D): last layer of the decoder, of vectors with the response to the cells' perturbations."""
        assert isinstance(prepared, ResponseBatch), "expected a batch with perturbations"
        response = _response(model, prepared.perturbation, prepared.perturbed)
        changed = vectors + response * (prepared.perturbation > 0)[:, None]
        return super()._decoded(model, changed.to(vectors.dtype), prepared)

    def log_profile(
        self, model: Any, vectors: torch.Tensor, perturbation: str | None, genes: list[int]
    ) -> torch.Tensor:
        """(C, H) -> (C, V - special) float32: log of each gene's share of a cell's counts, in an average batch.

        `perturbation` is a level, or another name, which has no learned vector; None for the cells as they are. `genes`
        are token ids of its genes, maybe none.
        """
        if perturbation is not None:
            levels = [*self.levels[self.config.perturbation_column]]
            number = levels.index(perturbation) + 1 if perturbation in levels else 0
            given = torch.tensor([number], device=vectors.device), _padded([genes]).to(vectors.device)
            vectors = vectors + _response(model, *given)
        logits = token_logits(model.decoder(vectors), model.profile_genes.weight, model.profile_bias)
        return logits[:, len(SPECIAL) :].float().log_softmax(1)


def _response(model: Any, perturbation: torch.Tensor, perturbed: torch.Tensor) -> torch.Tensor:
    """(C,) and (C, M) -> (C, H): the term that a perturbation adds to the cell embedding."""
    embedded = embed_tokens(perturbed.flatten(), model.profile_genes.weight).unflatten(0, perturbed.shape)
    is_gene = (perturbed != PAD_TOKEN)[..., None]
    mean = (embedded * is_gene).sum(1) / is_gene.sum(1).clamp(min=1)
    response: torch.Tensor = model.response_genes(mean.to(embedded.dtype)) + model.response_terms(perturbation)
    return response


def _padded(genes: list[list[int]]) -> torch.Tensor:
    """(C, M) int64, with M at least 1."""
    most = max((len(of_cell) for of_cell in genes), default=1) or 1
    rows = [of_cell + [PAD_TOKEN] * (most - len(of_cell)) for of_cell in genes]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(genes), most)
