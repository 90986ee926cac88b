"""masked_value and masked_gene: predict the values, or the genes, of masked tokens.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step,
cell, place). In training, `random_frac` of the masked tokens show random content and `keep_frac`
their own (Devlin et al. 2019): a random gene of the vocabulary, or the value of a random visible
gene of the cell. The second loss predicts the same targets from the cell's embedding and the
visible half of each masked token (scGPT, Cui et al. 2024, GEPC).

masked_value: cross-entropy of bins, squared error of continuous values. Genes differ far more in their mean than cells
in a gene, so values are judged by R² *over the gene mean*, and by the correlation after subtracting the gene mean from
both. Values depend on the sum of all counts of a cell, hidden ones included; `renormalize` computes what the model sees
from visible counts alone. Without it, both metrics include this leak.

masked_gene: the output matrix is the gene embedding, the baseline the frequency of genes in the training cells.

Legend: T tokens of the batch, N targets, H hidden, V tokens of the vocabulary.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import MaskedObjectiveConfig, MaskedValueConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import MASK_TOKEN, PAD_TOKEN, EncoderBatch, positions
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits, threshold
from cellmill.models.initial import STD, Fill, normal, zeros
from cellmill.models.objective import (
    GeneStatistics,
    Judgement,
    Objective,
    expected_bins,
    r2_over,
    r2_verdict,
    value_loss,
)
from cellmill.models.objectives.views import make_tokens
from cellmill.parallel.likelihoods import token_loss
from cellmill.parallel.vocab_parallel import rows_at, token_logits
from cellmill.runs.results import compare

NEVER = 2**63 - 1  # above every draw
# last keys of a masked token's draws
FATE = 2
CONTENT = 3


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(EncoderBatch):
    """A batch with its targets hidden, and the answers."""

    targets: Tensor
    """(targets,) int64, ascending: positions of the masked tokens, also of those that show content.
    """
    answers: Tensor  # (targets,): hidden genes (int64 token ids) or hidden values
    n_targets: Tensor

    def hiding_targets(self, hides_gene: bool) -> Self:
        """Return the batch with the gene, or the value, of every target hidden, also where the
        model is shown one.
        """
        if hides_gene:
            return replace(self, genes=self.genes.index_fill(0, self.targets, MASK_TOKEN))
        return replace(
            self,
            values=self.values.index_fill(0, self.targets, 0),
            value_hidden=self.value_hidden.index_fill(0, self.targets, True),
        )


class MaskedObjective(Objective):
    """Base of masked_value and masked_gene; needs a model with `states`, `inputs` and
    `cell_vectors`.
    """

    config: MaskedObjectiveConfig
    hides_gene: bool

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        hidden = model.width
        self.n_tokens = n_tokens

        def head(width: int) -> nn.Module:
            norm = nn.LayerNorm(hidden, eps=model.head_norm_eps)
            return nn.Sequential(nn.Linear(width, hidden), model.head_activation(), norm)

        model.head = head(hidden)
        names: tuple[str, ...] = ("head",)
        if self.config.cell_loss_weight:
            model.cell_head = head(2 * hidden)
            names = ("head", "cell_head", *model.plan.begin)
        return (*names, *self.attach_output(model, n_tokens))

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        """Add the layer from states to predictions; return the names that it reads."""
        raise NotImplementedError

    def prepare(self, batch: Batch, *, seed: int, step: int) -> MaskedBatch:
        """Draw the mask of a batch and hide the genes of masked tokens, or their values."""
        # validation hides all that is masked
        config = self.config
        splits = self._splits and self.training
        cell, place = positions(batch)
        keys = keyed_token_bits(batch.cells, cell, seed, step, place)
        is_gene = batch.genes > PAD_TOKEN  # neither padding nor an end of the cell
        draws = torch.where(is_gene, keys, NEVER)
        lowest = torch.full((len(batch.lengths),), NEVER, device=keys.device).scatter_reduce(
            0, cell, draws, "amin"
        )
        masked = ((draws < threshold(config.mask_frac)) | (draws == lowest[cell])) & is_gene
        targets = masked.nonzero().flatten()
        hidden = masked
        kept = torch.zeros_like(masked)
        if splits:
            fates = keyed_bits(keys, FATE)
            kept = masked & (fates >= threshold(1 - config.keep_frac)) & (config.keep_frac > 0)
            hidden = masked & ~kept & (fates < threshold(1 - config.keep_frac - config.random_frac))
        random = masked & ~kept & ~hidden
        genes = batch.genes
        values = batch.values
        value_hidden = torch.zeros_like(masked)
        if isinstance(config, MaskedValueConfig) and config.renormalize:
            assert batch.counts is not None, "the batch has no counts"
            counts = batch.counts * (~masked | kept)
            values = torch.zeros_like(values)
            given = (batch.genes.numpy(), counts.numpy(), batch.cu_seqlens.numpy())
            values[counts > 0] = make_tokens(*given, self.tokenizer)["values"]
        if self.hides_gene:
            genes = genes.masked_fill(hidden, MASK_TOKEN)
            if splits:
                others = len(SPECIAL) + keyed_bits(keys, CONTENT) % (self.n_tokens - len(SPECIAL))
                genes = torch.where(random, others, genes)
        else:
            # random values are those of a visible token of the cell; in a cell without one they are
            # hidden
            donors = (is_gene & ~masked).nonzero().flatten()
            n = torch.bincount(cell[donors], minlength=len(batch.lengths))[cell]
            value_hidden = hidden | (random & (n == 0))
            random = random & (n > 0)
            first = torch.searchsorted(cell[donors], cell)
            chosen = (first + keyed_bits(keys, CONTENT) % n.clamp(min=1))[random]
            shown = values[donors[chosen]]
            values = values.masked_fill(value_hidden, 0)
            values[random] = shown
        return MaskedBatch.prepared(
            batch,
            (seed, step),
            genes=genes,
            values=values,
            value_hidden=value_hidden,
            value_known=~masked | self.hides_gene,
            targets=targets,
            answers=(batch.genes if self.hides_gene else batch.values)[targets],
            n_targets=torch.tensor(len(targets), device=keys.device),
        )

    def loss(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        targets = prepared.targets
        loss = self.loss_of(model, model.head(states[targets]), prepared)
        if self.config.cell_loss_weight:
            cells = model.cell_vectors(states, prepared).to(states.dtype)
            # the targets are embedded again: the last stage of a pipeline does not receive the
            # embeddings
            queried = prepared.hiding_targets(self.hides_gene) if self._splits else prepared
            queries = torch.cat(
                [rows_at(cells, prepared.cell[targets]), model.inputs(queried, targets)], dim=-1
            )
            loss = loss + self.config.cell_loss_weight * self.loss_of(
                model, model.cell_head(queries), prepared
            )
        return loss

    @property
    def _splits(self) -> bool:
        return self.config.random_frac + self.config.keep_frac > 0

    def loss_of(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """Return the summed loss of predictions from the states (N, H) of a head."""
        raise NotImplementedError


class MaskedValue(MaskedObjective):
    config: MaskedValueConfig
    hides_gene = False

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        model.hidden_value = nn.Parameter(torch.empty(model.width))
        model.value_out = nn.Linear(
            model.width, self.tokens.n_values - self._first_bin if self._is_class else 1
        )
        return ("value_out",)

    def initial_value(self, name: str) -> Fill | None:
        return normal(STD) if name == "hidden_value" else None

    def loss_of(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        return value_loss(self.predict(model, states, prepared), prepared.answers, self._first_bin)

    def predict(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """(N, H) -> float32 values (N,), or logits of bins (N, bins)."""
        out = model.value_out(states).float()
        return (
            out
            if self._is_class
            else out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]
        )

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[Tensor, ...]:
        """Return vocabulary row, true value and predicted value of each target; for bins the
        expected bin.
        """
        predicted = self.predict(
            model, model.head(model.states(prepared)[prepared.targets]), prepared
        )
        if predicted.ndim == 2:
            predicted = expected_bins(predicted, self._first_bin)
        return prepared.genes[prepared.targets] - len(SPECIAL), prepared.answers, predicted

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        genes, (targets, predicted) = (
            observed[0],
            (array.astype(np.float64) for array in observed[1:]),
        )
        by_gene = train.mean[genes]
        others = (predicted, by_gene, train.global_mean)
        mse, mse_gene, mse_global = (float(np.mean((targets - other) ** 2)) for other in others)
        r2 = r2_over(mse_gene, mse)
        a, b = (centered - centered.mean() for centered in (targets - by_gene, predicted - by_gene))
        scale = math.sqrt(float(a @ a) * float(b @ b))
        metrics = {
            "n_targets": len(targets),
            "r2_over_gene_mean": r2,
            "r2_over_global_mean": r2_over(mse_global, mse),
            "pearson_gene_centred": float(a @ b) / scale if scale > 0 else None,
            "mse": mse,
            "mse_gene_mean": mse_gene,
            "mse_global_mean": mse_global,
        }
        return metrics, r2_verdict("prediction of masked values", "the gene's training mean", r2)

    @property
    def _first_bin(self) -> int:
        """Bins count from 1; 0 is that of genes without counts."""
        return 0 if self.tokens.zero_frac else 1

    @property
    def _is_class(self) -> bool:
        return self.tokens.value_kind == "class"


class MaskedGene(MaskedObjective):
    hides_gene = True
    gene_rows = frozenset({"gene_bias"})

    def attach_output(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        model.gene_bias = nn.Parameter(torch.empty(n_tokens))
        return ("gene_bias", "gene_embedding")

    def initial_value(self, name: str) -> Fill | None:
        return zeros if name == "gene_bias" else None

    def loss_of(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        return token_loss(states, model.gene_embedding.weight, model.gene_bias, prepared.answers)

    def predict(self, model: Any, states: Tensor, prepared: MaskedBatch) -> Tensor:
        """(N, H) -> float32 logits of genes (N, V)."""
        return token_logits(states, model.gene_embedding.weight, model.gene_bias)

    def observe(self, model: Any, prepared: MaskedBatch) -> tuple[Tensor, ...]:
        logits = self.predict(model, model.head(model.states(prepared)[prepared.targets]), prepared)
        answers = prepared.answers
        entropy = F.cross_entropy(logits, answers, reduction="none")
        return answers - len(SPECIAL), logits.argmax(1) == answers, entropy

    def judge(self, *observed: np.ndarray, train: GeneStatistics) -> Judgement:
        genes, correct, cross_entropy = observed
        frequency = (train.n + 1) / (train.n.sum() + len(train.n))
        base = float(-np.log(frequency[genes]).mean())
        entropy = float(cross_entropy.astype(np.float64).mean())
        metrics = {
            "n_targets": len(genes),
            "accuracy": float(correct.mean()),
            "accuracy_frequency": float((genes == int(train.n.argmax())).mean()),
            "cross_entropy": entropy,
            "cross_entropy_frequency": base,
        }
        name = "prediction of masked genes"
        against = "gene frequency in training cells"
        return metrics, [
            compare(name, against, "nats cross-entropy", entropy - base, lower_is_better=True)
        ]
