"""masked_gene: predict which genes the masked tokens are.

The matrix of the output layer is the gene embedding. The baseline of `judge` predicts each gene with the
gene's frequency in training cells.

In the shapes below, "targets" are the masked tokens, and "vocabulary" is the number of token ids.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import MASK_TOKEN
from cellmill.models.counter_rng import keyed_bits
from cellmill.models.draws import REPLACEMENT_KEY
from cellmill.models.initial import Fill, zeros
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    ObjectiveModel,
    cross_entropy_verdicts,
)
from cellmill.models.objectives.shared.masking import Mask, MaskedBatch, MaskedObjective
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import token_logits


class GeneObservations(NamedTuple):
    """Observations of masked genes, (targets,) each: tensors in `observe`, and arrays in `judge`."""

    genes: Any  # int64: the vocabulary rows of the true genes
    is_correct: Any  # bool: True if the true gene has the highest logit
    losses: Any  # float32: the cross-entropy of the true gene


class MaskedGene(MaskedObjective):
    """Predict the genes of masked tokens, whose values the model sees."""

    predicts_genes = True
    gene_rows = frozenset({"gene_bias"})
    n_genes: int  # the number of genes in the vocabulary; `attach` sets it

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.n_genes = vocab_size - len(SPECIAL)
        model.gene_bias = nn.Parameter(torch.empty(vocab_size))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        return zeros if name == "gene_bias" else None

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide the genes of masked tokens, or replace them by random genes of the vocabulary."""
        token_ids = batch.token_ids.masked_fill(mask.hidden, MASK_TOKEN)
        if mask.replaced.any():
            draws = keyed_bits(mask.draws[mask.replaced], REPLACEMENT_KEY)
            token_ids[mask.replaced] = len(SPECIAL) + draws % self.n_genes
        return {"token_ids": token_ids}

    def head_loss(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        table = model.gene_embedding.weight
        return token_loss(head_output, table, model.gene_bias, prepared.targets)

    def predict_from_head(
        self, model: ObjectiveModel, head_output: Tensor, prepared: MaskedBatch
    ) -> Tensor:
        """Predict the logits of all token ids, (targets, vocabulary) float32.

        `head_output` is (targets, width). Special tokens have logits too, although they are never targets.
        """
        return token_logits(head_output, model.gene_embedding.weight, model.gene_bias)

    def observe(self, model: ObjectiveModel, prepared: MaskedBatch) -> GeneObservations:
        targets = prepared.targets
        states = model.states(prepared)[prepared.target_tokens]
        logits = self.predict_from_head(model, model.head(states), prepared)
        return GeneObservations(
            genes=targets - len(SPECIAL),
            is_correct=logits.argmax(1) == targets,
            losses=F.cross_entropy(logits, targets, reduction="none"),
        )

    def judge(self, *observed: np.ndarray, statistics: GeneStatistics) -> Judgement:
        """Compare the predicted genes with the frequencies of genes in training cells.

        The baseline of the cross-entropy predicts these frequencies. The baseline of the accuracy always
        predicts the most frequent gene. If the model reads a view, only the tokens that views of training
        cells show are counted.
        """
        genes, is_correct, losses = GeneObservations(*observed)
        loss = float(losses.astype(np.float64).mean())

        n_tokens = statistics.n_tokens
        # one token more of each gene, so that no gene has frequency 0
        frequencies = (n_tokens + 1) / (n_tokens.sum() + len(n_tokens))
        baseline_loss = float(-np.log(frequencies[genes]).mean())
        commonest_gene = int(n_tokens.argmax())

        metrics = {
            "n_targets": len(genes),
            "accuracy": float(is_correct.mean()),
            "accuracy_frequency": float((genes == commonest_gene).mean()),
            "cross_entropy": loss,
            "cross_entropy_frequency": baseline_loss,
        }

        name = "prediction of masked genes"
        against = "gene frequency in training cells"
        if self.tokens.sequences:
            name = "prediction of masked residues"
            against = "residue frequency in training sequences"
        return metrics, cross_entropy_verdicts(name, against, loss - baseline_loss)
