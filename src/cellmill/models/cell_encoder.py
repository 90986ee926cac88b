"""Shared part of families that encode cells to vectors: states after the last norm, heads, embedding.

Legend: R rows of the residual stream (tokens, or cells), H hidden.
"""

from dataclasses import replace

import torch
from torch import nn

from cellmill.models.batch import TensorBatch
from cellmill.models.covariates import CovariatePrefix
from cellmill.models.encoder_batch import EncoderBatch, whole
from cellmill.models.family import Model


class CellEncoder(Model):
    """Base of families whose blocks are followed by `norm`; they define `begin`, `through` and `cell_vectors`."""

    norm: nn.Module
    hidden_value: nn.Parameter
    """(H,): embedding of a hidden value, attached by objectives that hide values."""
    covariate_prefix: CovariatePrefix | None = None
    """Tokens of obs columns before the genes of each cell."""

    def attach_heads(self, n_tokens: int) -> None:
        """Add the objective's heads, and what layouts and `init_from` have to know of them."""
        trunk = {name for name, _ in [*self.named_children(), *self.named_parameters(recurse=False)]} | {
            *self.plan.begin
        }
        finish = ("norm", *self.objective.attach(self, n_tokens))
        self.heads = tuple(name for name in finish if name not in trunk)
        self.plan = replace(self.plan, tensor={**self.plan.tensor, **self.objective.tensor}, finish=finish)
        self.gene_rows = self.gene_rows | self.objective.gene_rows

    def view(self, batch: TensorBatch, *, seed: int, step: int) -> TensorBatch:
        """Return the objective's view, with the tokens of obs columns."""
        view = super().view(batch, seed=seed, step=step)
        if self.covariate_prefix is None:
            return view
        return self.covariate_prefix.before(view, (seed, step) if self.training else None)

    def finish(self, x: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """Return the objective's summed loss of the normed states: `Objective.loss`; 0 while `kept_rows` is a list."""
        states = self.norm(x)
        if self.kept_rows is not None:
            self.kept_rows.append(self.objective.rows(self, states, prepared))
            return torch.zeros((), device=x.device)
        self.keep_vectors(lambda: self.cell_vectors(states, prepared))
        return self.objective.loss(self, states, prepared)

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """(cells, H) float32: the vectors of whole cells."""
        prepared = whole(batch if self.covariate_prefix is None else self.covariate_prefix.before(batch))
        return self.cell_vectors(self.states(prepared), prepared)

    def states(self, prepared: EncoderBatch) -> torch.Tensor:
        """(R, H): the normed output of the last block."""
        return self.norm(self.through(self.begin(prepared), prepared))

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(R, H) -> (cells, H) float32."""
        raise NotImplementedError
