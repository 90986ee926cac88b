"""masked_gene: predict which genes the masked tokens are; their values stay visible.

The output matrix is the gene embedding. The baseline is the frequency of genes in the training cells.

Legend: N targets, H hidden, V tokens of the vocabulary.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL
from cellmill.models.initial import Fill, zeros
from cellmill.models.objective import GeneStatistics
from cellmill.models.objectives.masking import MaskedBatch, MaskedObjective
from cellmill.parallel.cross_entropy import token_loss
from cellmill.parallel.vocab_parallel import token_logits
from cellmill.runs.verdict import Verdict, compare


class MaskedGene(MaskedObjective):
    """See the module."""

    hides_gene = True
    gene_rows = frozenset({"gene_bias"})

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add `gene_bias`; the matrix is the gene embedding."""
        model.gene_bias = nn.Parameter(torch.empty(n_tokens))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        """Initialize the bias to zero."""
        return zeros if name == "gene_bias" else None

    def loss_of(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Return the summed cross-entropy over the vocabulary, in chunks."""
        return token_loss(states, model.gene_embedding.weight, model.gene_bias, prepared.answers)

    def predict(self, model: Any, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(N, H) -> float32 logits of genes (N, V)."""
        return token_logits(states, model.gene_embedding.weight, model.gene_bias)

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, top-1 correctness and cross-entropy of each target."""
        logits = self.predict(model, model.head(model.states(prepared)[prepared.targets]), prepared)
        answers = prepared.answers
        entropy = F.cross_entropy(logits, answers, reduction="none")
        return answers - len(SPECIAL), logits.argmax(1) == answers, entropy

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> tuple[dict[str, Any], list[Verdict]]:
        """Return accuracy and cross-entropy (nats) of the model and of add-one gene frequencies, and a verdict."""
        genes, correct, cross_entropy = observed
        frequency = (train.n + 1) / (train.n.sum() + len(train.n))
        base = float(-np.log(frequency[genes]).mean())
        entropy = float(cross_entropy.astype(np.float64).mean())
        figures = {
            "n_targets": len(genes),
            "accuracy": float(correct.mean()),
            "accuracy_frequency": float((genes == int(train.n.argmax())).mean()),
            "cross_entropy": entropy,
            "cross_entropy_frequency": base,
        }
        name, against = "prediction of masked genes", "gene frequency in training cells"
        return figures, [compare(name, against, "nats cross-entropy", entropy - base, lower_is_better=True)]
