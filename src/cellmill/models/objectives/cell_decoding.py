"""cell_decoding: predict the hidden part of a cell's expression, over the whole vocabulary, from
its embedding.

A view of each cell is encoded and pooled to a vector; a decoder turns it into a softmax over all
genes, whose cross-entropy with the hidden expression is the loss. Which genes are on is what a cell
is: values of detected genes alone are mostly sequencing depth. With `weights: counts` this is the
multinomial likelihood of the hidden counts given their sum, divided by the sum; with `likelihood:
nb` the negative binomial likelihood of all genes' hidden counts, zeros included, also divided by
the sum. With `view_loss` the hidden part is encoded too, and VICReg of the vectors of both parts is
added in training only. `judge` compares with the mean profile of the training cells.

Two ways to keep a cell's batch out of its vector: the decoder gets a vector of each batch
(`LevelTerms`), so that the cell's need not encode it, as in scVI (Lopez et al. 2018); an
`Adversary` predicts the batch from the cell's vector, through a reversed gradient that makes the
encoder hide it (Ganin & Lempitsky 2015).

perturbation_response: the decoder is given the cell's vector plus a response to its perturbation, as in CPA (Lotfollahi
et al. 2023, Mol. Syst. Biol. 19:e11517): a projection of what the decoder knows of the perturbed genes, a bias that all
perturbations share, and a learned vector of each perturbation. Controls have no response. A perturbation that was not
trained on has the first two, so it can be predicted if its gene is known; its learned vector stays zero. The loss is of
binomial draws: the response has to explain the part of the counts that the cell's vector, made from the other part,
does not.

Legend: C cells with targets, H width of a cell's vector, D width of the decoder's last layer, M most genes of a
perturbation, V tokens of the vocabulary. Numbers of levels begin at 1, 0 is an unknown one.
"""

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.parts.objectives import PerturbationResponseConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import MISSING
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, EncoderBatch
from cellmill.models.blocks import Reversed
from cellmill.models.initial import Fill, with_std, zeros
from cellmill.models.objective import GeneStatistics, Objective, RowShare
from cellmill.models.objectives.views import Decoding, ViewBatch, draw_view
from cellmill.parallel.likelihoods import profile_loss
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits
from cellmill.runs.verdict import Verdict, compare

VARIANCE_EPS = 1e-4


def vicreg(table: torch.Tensor, weights: tuple[float, float, float]) -> torch.Tensor:
    """Return n times the loss, a float64 scalar, of rows (slots, 1 + 2 H): 1, z and z'; rows of
    zeros are no cells.

    z and z' are the vectors of the n cells of a global batch, C and C' their covariances, divided
    by n - 1; `weights`:

    - invariance: the mean over cells and directions of (z - z')^2
    - variance: the mean over directions of max(0, 1 - sqrt(C_jj + 1e-4)), for both views
    - covariance: the sum of squares of C off its diagonal, divided by H, for both views

    Float64, as a covariance is the small difference of large numbers. Source: Bardes, Ponce & LeCun
    2022, equations 1 to 6; the invariance is divided by H, as in the authors' code.
    """
    width = table.shape[1] // 2
    filled, *views = table.double().split([1, width, width], dim=1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    invariance, variance, covariance = weights
    first, second = views
    loss = invariance * (first - second).square().sum() / (n * width)
    for z in views:
        centered = z - filled * (z.sum(0) / n)
        matrix = centered.T @ centered / (n - 1).clamp(min=1)
        variances = matrix.diagonal()
        hinge = F.relu(1 - (variances + VARIANCE_EPS).sqrt()).mean()
        correlated = (matrix.square().sum() - variances.square().sum()) / width
        loss = loss + variance * hinge + covariance * correlated
    return n_cells * loss


class LevelTerms(nn.Module):
    """A vector of each level, zero for an unknown one; of `centered` ones the mean over levels is
    subtracted.
    """

    def __init__(self, levels: int, width: int, centered: bool = True) -> None:
        super().__init__()
        self.centered = centered
        self.weight = nn.Parameter(torch.empty(levels, width))

    def initial_value(self, name: str) -> Fill:
        return zeros

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        terms = self.weight - self.weight.mean(0) if self.centered else self.weight
        return F.embedding(numbers, F.pad(terms, (0, 0, 1, 0)))


class Adversary(nn.Module):
    """Classifier of the level from the cell embedding, whose gradient to the embedding is reversed,
    times `scale`.
    """

    def __init__(self, hidden: int, levels: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = with_std(nn.Linear(hidden, hidden), hidden**-0.5)
        self.out = with_std(nn.Linear(hidden, levels), hidden**-0.5)

    def forward(self, vectors: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """(C, H) and (C,) int64 -> cross-entropy summed over cells of known level, a float32
        scalar.
        """
        logits = self.out(F.gelu(self.inner(Reversed.apply(vectors, self.scale)))).float()
        return F.cross_entropy(logits, numbers - 1, ignore_index=-1, reduction="sum")


@dataclass(frozen=True, kw_only=True)
class DecodingBatch(EncoderBatch):
    """The shown tokens and the profiles to predict."""

    target_cells: torch.Tensor  # (C,) int64: indices of the cells that have something to predict
    entries: list[int]  # entries of each of these cells
    starts: torch.Tensor  # (C + 1,) int64: the first entry of each of these cells, and their number
    genes_hidden: torch.Tensor  # (entries,) int64: token ids, cell after cell
    # (entries,) float32; those of a cell sum to 1. With likelihood nb, the counts
    weights: torch.Tensor
    n_targets: torch.Tensor  # C: each cell counts once, whatever its depth
    pairs: torch.Tensor
    """(2, pairs) int64: indices of the shown and of the hidden part of cells that have both; none
    without view_loss.
    """
    shares: tuple[RowShare, ...] | None = None
    """This micro-batch's part of the view loss of the global batch; None in the pass that collects
    its rows.
    """


class CellDecoding(Objective):
    """See the module; needs a model with `cell_vectors`."""

    config: Decoding
    tensor = MappingProxyType({"profile_genes": "vocabulary"})
    gene_rows = frozenset({"profile_genes.weight", "profile_bias", "profile_dispersion"})

    def attach(self, model: Any, n_tokens: int) -> tuple[str, ...]:
        config = self.config
        given = model.vector_width
        self.row_widths = (1 + 2 * given,) if config.view_loss else ()
        width = config.decoder_hidden or given
        names = ["decoder", "profile_genes", "profile_bias"]
        model.decoder = nn.Identity()
        if config.decoder_hidden:
            model.decoder = nn.Sequential(with_std(nn.Linear(given, width), given**-0.5), nn.GELU())
        model.profile_genes = with_std(nn.Embedding(n_tokens, width), width**-0.5)
        model.profile_bias = nn.Parameter(torch.empty(n_tokens))
        column = config.batch_column
        if column is not None:
            n_levels = len(self.levels[column])
            rows = ["batch_terms.weight"]
            model.batch_terms = LevelTerms(n_levels, width)
            if config.batch_adversary is not None:
                model.batch_adversary = Adversary(given, n_levels, config.batch_adversary_scale)
                rows += ["batch_adversary.out.weight", "batch_adversary.out.bias"]
            model.level_rows = {**model.level_rows, **dict.fromkeys(rows, column)}
            names += dict.fromkeys(name.split(".")[0] for name in rows)
        if self._is_nb:
            model.profile_dispersion = nn.Parameter(torch.empty(n_tokens))
            names.append("profile_dispersion")
        return tuple(names)

    def initial_value(self, name: str) -> Fill | None:
        """Initialize the bias to zero, and log dispersions to those of variance mean + mean
        squared.
        """
        return zeros if name in ("profile_bias", "profile_dispersion") else None

    def view(self, batch: Batch, *, seed: int, step: int) -> ViewBatch:
        return draw_view(batch, self.tokenizer, self.config, seed=seed, step=step)

    def prepare(self, batch: Batch, *, seed: int, step: int) -> DecodingBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        cell = batch.profile_cell.numpy()
        entries = np.bincount(cell, minlength=len(batch.lengths))
        cells = np.flatnonzero(entries)
        weights = batch.profile_count.double()
        if not self._is_nb:
            weights = weights.log1p() if self.config.weights == "log1p" else weights
            weights /= torch.from_numpy(np.bincount(cell, weights.numpy(), len(entries))[cell])
        lengths = torch.tensor(batch.lengths[: 2 * batch.paired], dtype=torch.int64).view(
            2, batch.paired
        )
        first = (lengths > 0).all(0).nonzero().flatten()  # cells with tokens in both views
        return DecodingBatch.prepared(
            batch,
            (seed, step),
            target_cells=torch.from_numpy(cells),
            entries=entries[cells].tolist(),
            starts=torch.from_numpy(np.append(0, entries[cells].cumsum())),
            genes_hidden=batch.profile_gene,
            weights=weights.float(),
            n_targets=torch.tensor(len(cells)),
            pairs=torch.stack([first, first + batch.paired]),
        )

    @property
    def _is_nb(self) -> bool:
        return self.config.likelihood == "nb"

    @property
    def predicts_log_counts(self) -> bool:
        """True if the profile is of log(1 + count), not of counts."""
        return not self._is_nb and self.config.weights == "log1p"

    def loss(self, model: Any, states: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """Return the summed loss, a float32 scalar; in training with VICReg and the adversary's
        loss.
        """
        config = self.config
        vectors = self._vectors(model, states, prepared)
        decoded = self._decoded(model, vectors, prepared)
        table = model.profile_genes.weight
        hidden = prepared.entries, prepared.starts, prepared.genes_hidden, prepared.weights
        dispersion = model.profile_dispersion if self._is_nb else None
        loss = profile_loss(decoded, table, model.profile_bias, *hidden, dispersion)
        if prepared.shares is not None:
            for share, rows in zip(prepared.shares, self.rows(model, states, prepared)):
                loss = loss + share.of(rows)
        if config.batch_adversary is None or not model.training:
            # validation chooses a checkpoint: an encoder that hides the batch must not count as
            # worse
            return loss
        return loss + config.batch_adversary * model.batch_adversary(
            vectors, self._batch_of(prepared)
        )

    def rows(
        self, model: Any, states: torch.Tensor, prepared: DecodingBatch
    ) -> tuple[torch.Tensor, ...]:
        """(pairs, 1 + 2 H): 1, and the vectors of the shown and of the hidden part."""
        vectors = model.cell_vectors(states, prepared)
        first = vectors[prepared.pairs[0]]
        second = vectors[prepared.pairs[1]]
        return (torch.cat([first.new_ones(len(first), 1), first, second], dim=1),)

    def loss_of_rows(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config, (table,) = self.config, tables
        return (
            vicreg(
                table, (config.invariance_weight, config.variance_weight, config.covariance_weight)
            ),
        )

    def _vectors(self, model: Any, states: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        return model.cell_vectors(states, prepared)[prepared.target_cells].to(states.dtype)

    def _decoded(self, model: Any, vectors: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """(C, D): last layer of the decoder."""
        decoded: torch.Tensor = model.decoder(vectors)
        if self.config.batch_column is None:
            return decoded
        return decoded + model.batch_terms(self._batch_of(prepared)).to(decoded.dtype)

    def _batch_of(self, prepared: DecodingBatch) -> torch.Tensor:
        """(C,) int64: number of each cell's batch."""
        return self.level_numbers(prepared, self.config.batch_column or "")[prepared.target_cells]

    def observe(self, model: Any, prepared: DecodingBatch) -> tuple[torch.Tensor, ...]:
        """Return vocabulary row, log-probability and weight of each hidden gene, and its cell's
        share of all cells.
        """
        vectors = self._decoded(
            model, self._vectors(model, model.states(prepared), prepared), prepared
        )
        log_p = token_logits(vectors, model.profile_genes.weight, model.profile_bias).log_softmax(1)
        lengths = prepared.starts.diff()
        cell = torch.repeat_interleave(lengths, output_size=len(prepared.weights))
        per_cell = (1 / lengths.double())[cell]  # sums to 1 over the entries of a cell
        weights = prepared.weights
        if self._is_nb:  # dispersions are not judged: the mean profile of training cells has none
            weights = weights / weights.new_zeros(len(lengths)).index_add(0, cell, weights)[cell]
        return (
            prepared.genes_hidden - len(SPECIAL),
            log_p[cell, prepared.genes_hidden],
            weights,
            per_cell,
        )

    def judge(
        self, *observed: np.ndarray, train: GeneStatistics
    ) -> tuple[dict[str, Any], list[Verdict]]:
        genes, log_p, weights, per_cell = observed
        # other values are no expression
        value = train.mean if self.tokens.value_kind == "scalar" else 1.0
        expressed = train.n * value + 1  # add one: a gene that no training cell has
        mean_profile = np.log(expressed / expressed.sum())
        n_cells = per_cell.sum()
        model, base = (
            float(-(weights * values).sum() / n_cells) for values in (log_p, mean_profile[genes])
        )
        metrics = {
            "n_targets": len(genes),
            "cross_entropy": model,
            "cross_entropy_mean_profile": base,
        }
        metrics["saved_frac"] = 1 - model / base
        name = f"prediction of {'hidden' if self.config.target == 'hidden' else 'all'} genes"
        against = "mean profile of training cells"
        return metrics, [
            compare(name, against, "nats cross-entropy", model - base, lower_is_better=True)
        ]


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
        width = model.vector_width
        levels = self.levels[self.config.perturbation_column]
        known = self.config.perturbed_genes or {}
        # no response at the start
        model.response_genes = with_std(nn.Linear(self.config.decoder_hidden or width, width), 0.0)
        model.response_terms = LevelTerms(len(levels), width, centered=False)
        model.level_rows = {
            **model.level_rows,
            "response_terms.weight": self.config.perturbation_column,
        }
        self._genes = [[], *(known.get(level, []) for level in levels)]
        self._excluded = {
            0,
            *(number for number, level in enumerate(levels, start=1) if level == MISSING),
        }
        self._control = (
            1 + levels.index(self.config.control) if self.config.control in levels else 0
        )
        return (*names, "response_genes", "response_terms")

    def prepare(self, batch: Batch, *, seed: int, step: int) -> ResponseBatch:
        assert isinstance(batch, ViewBatch), "expected a view"
        numbers = self.level_numbers(batch, self.config.perturbation_column)
        known = ~torch.isin(numbers, torch.tensor([*self._excluded]))[batch.profile_cell]
        parts = {
            name: getattr(batch, name)[known]
            for name in ("profile_cell", "profile_gene", "profile_count")
        }
        prepared = super().prepare(replace(batch, **parts), seed=seed, step=step)
        perturbation = numbers[prepared.target_cells]
        return ResponseBatch(
            **{field.name: getattr(prepared, field.name) for field in fields(prepared)},
            perturbation=torch.where(perturbation == self._control, 0, perturbation),
            perturbed=_padded([self._genes[number] for number in perturbation.tolist()]),
        )

    def _decoded(self, model: Any, vectors: torch.Tensor, prepared: DecodingBatch) -> torch.Tensor:
        """(C, D): last layer of the decoder, of vectors with the response to the cells'
        perturbations.
        """
        assert isinstance(prepared, ResponseBatch), "expected a batch with perturbations"
        response = _response(model, prepared.perturbation, prepared.perturbed)
        changed = vectors + response * (prepared.perturbation > 0)[:, None]
        return super()._decoded(model, changed.to(vectors.dtype), prepared)

    def log_profile(
        self, model: Any, vectors: torch.Tensor, perturbation: str | None, genes: list[int]
    ) -> torch.Tensor:
        """(C, H) -> (C, V - special) float32: log of each gene's share of a cell's counts, in an
        average batch.

        `perturbation` is a level, or another name, which has no learned vector; None for the cells
        as they are. `genes` are token ids of its genes, maybe none.
        """
        if perturbation is not None:
            levels = [*self.levels[self.config.perturbation_column]]
            number = levels.index(perturbation) + 1 if perturbation in levels else 0
            given = (
                torch.tensor([number], device=vectors.device),
                _padded([genes]).to(vectors.device),
            )
            vectors = vectors + _response(model, *given)
        logits = token_logits(
            model.decoder(vectors), model.profile_genes.weight, model.profile_bias
        )
        return logits[:, len(SPECIAL) :].float().log_softmax(1)


def _response(model: Any, perturbation: torch.Tensor, perturbed: torch.Tensor) -> torch.Tensor:
    """(C,) and (C, M) -> (C, H): the term that a perturbation adds to the cell embedding."""
    embedded = embed_tokens(perturbed.flatten(), model.profile_genes.weight).unflatten(
        0, perturbed.shape
    )
    is_gene = (perturbed != PAD_TOKEN)[..., None]
    mean = (embedded * is_gene).sum(1) / is_gene.sum(1).clamp(min=1)
    response: torch.Tensor = model.response_genes(mean.to(embedded.dtype)) + model.response_terms(
        perturbation
    )
    return response


def _padded(genes: list[list[int]]) -> torch.Tensor:
    """(C, M) int64, with M at least 1."""
    most = max((len(of_cell) for of_cell in genes), default=1) or 1
    rows = [of_cell + [PAD_TOKEN] * (most - len(of_cell)) for of_cell in genes]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(genes), most)
