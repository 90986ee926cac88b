"""Predict the next gene of each cell from the tokens so far.

Legend: T tokens of the batch, N targets, H width of the model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import positions
from cellmill.models.initial import Fill, zeros
from cellmill.models.objective import GeneStatistics, Objective, ObjectiveModel
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import token_logits
from cellmill.runs.results import Verdict, compare

PAD = SPECIAL.index("<pad>")


@dataclass(frozen=True)
class CausalBatch:
    """A batch, and which gene follows each target."""

    token_ids: torch.Tensor
    position: torch.Tensor
    """(T,) int64: position of a token in its cell."""
    cu_seqlens: torch.Tensor
    lengths: list[int]
    target_tokens: torch.Tensor
    """(N,) int64: tokens with a next one in their cell."""
    targets: torch.Tensor
    """(N,) int64: token ids of the next ones."""
    n_targets: torch.Tensor


def causal_batch(batch: Batch, skip: int) -> CausalBatch:
    """The batch with its next genes; nothing is random."""
    cell, position = positions(batch)
    follows = torch.zeros(len(cell), dtype=torch.bool, device=cell.device)
    follows[:-1] = (cell[1:] == cell[:-1]) & (batch.token_ids[1:] != PAD) & (position[:-1] >= skip)
    target_tokens = follows.nonzero().flatten()
    return CausalBatch(
        token_ids=batch.token_ids,
        position=position,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        target_tokens=target_tokens,
        targets=batch.token_ids[target_tokens + 1],
        n_targets=torch.tensor(len(target_tokens), device=cell.device),
    )


class NextGene(Objective):
    """See the module."""

    def attach(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        """Add a bias; the output matrix is the gene embedding."""
        model.gene_bias = nn.Parameter(torch.empty(vocab_size))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        """Begin without a bias."""
        return zeros if name == "gene_bias" else None

    def prepare(self, batch: Batch, *, seed: int, step: int) -> CausalBatch:
        """Find the next genes."""
        return causal_batch(batch, self.config.skip)

    def loss(
        self, model: ObjectiveModel, states: torch.Tensor, prepared: CausalBatch
    ) -> torch.Tensor:
        """Summed cross-entropy over the vocabulary, in chunks."""
        return token_loss(
            states[prepared.target_tokens],
            model.gene_embedding.weight,
            model.gene_bias,
            prepared.targets,
        )

    def observe(self, model: ObjectiveModel, prepared: CausalBatch) -> tuple[torch.Tensor, ...]:
        """Vocabulary row of each next gene, and whether it was the first choice."""
        logits = token_logits(
            model.states(prepared)[prepared.target_tokens],
            model.gene_embedding.weight,
            model.gene_bias,
        )
        return prepared.targets - len(SPECIAL), logits.argmax(1) == prepared.targets

    def judge(
        self, *observed: np.ndarray, statistics: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        """Accuracy beside that of always naming the most frequent gene."""
        genes, correct = observed
        accuracy = float(correct.mean())
        frequent = float((genes == int(statistics.n_tokens.argmax())).mean())
        figures = {"n_targets": len(genes), "accuracy": accuracy, "accuracy_frequency": frequent}
        return figures, [
            compare("next gene", "the most frequent gene", "accuracy", accuracy - frequent)
        ]
