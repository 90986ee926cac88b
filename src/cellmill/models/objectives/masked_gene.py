"""masked_gene: predict which genes the masked tokens are.

The output matrix is the gene embedding. The baseline is the frequency of genes in training cells.

Legend: T tokens of the batch, N targets, H width of the model, V size of the vocabulary.
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
    """Observations, `(N,)` each: tensors in `observe`, arrays in `judge`."""

    genes: Any  # int64: vocabulary rows
    is_correct: Any  # bool: the gene has the highest logit
    losses: Any  # float32: cross-entropy


class MaskedGene(MaskedObjective):
    predicts_genes = True
    gene_rows = frozenset({"gene_bias"})
    n_genes: int  # genes of the vocabulary; set by `attach`

    def attach_output(self, model: ObjectiveModel, vocab_size: int) -> tuple[str, ...]:
        self.n_genes = vocab_size - len(SPECIAL)
        model.gene_bias = nn.Parameter(torch.empty(vocab_size))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        return zeros if name == "gene_bias" else None

    def corrupt(self, batch: Batch, mask: Mask) -> dict[str, Tensor]:
        """Hide genes, or replace them by a random gene of the vocabulary."""
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
        """Predict logits of genes, `(N, V)` float32, from the head's output `(N, H)`.

        Special tokens are included, although never targets.
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
        """Score predicted genes against the most frequent gene and the frequencies of all genes.

        Frequencies are over the tokens of training cells, in a view over those that it shows.
        """
        genes, is_correct, losses = GeneObservations(*observed)
        n_tokens = statistics.n_tokens
        # add one, so that no gene has frequency 0
        frequency = (n_tokens + 1) / (n_tokens.sum() + len(n_tokens))
        baseline_loss = float(-np.log(frequency[genes]).mean())
        loss = float(losses.astype(np.float64).mean())
        metrics = {
            "n_targets": len(genes),
            "accuracy": float(is_correct.mean()),
            "accuracy_frequency": float((genes == int(n_tokens.argmax())).mean()),
            "cross_entropy": loss,
            "cross_entropy_frequency": baseline_loss,
        }
        name = "prediction of masked genes"
        against = "gene frequency in training cells"
        if self.tokens.sequences:
            name = "prediction of masked residues"
            against = "residue frequency in training sequences"
        return metrics, cross_entropy_verdicts(name, against, loss - baseline_loss)
