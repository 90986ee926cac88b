"""Changes of expression under perturbations: measured, and predicted for held-out units by
baselines or by the model.

A unit is a perturbation with its dose, and with its context (such as a donor) where contexts are
held out. Of a tested unit only the gene, the context and the strata of its cells are read, never
its expression.

Expression is log(1 + counts per 10,000) over the model's genes that the dataset has. A measured
change is the mean over a unit's cells minus the mean over controls of the same stratum (a batch of
a donor). Predictions start from one random half of the controls and changes are measured from the
other: otherwise the noise of the controls would be in both.

Legend: U units, G genes, F features of a unit, C controls.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold, KFold
from sklearn.preprocessing import StandardScaler

from cellmill.config.corpus import IS_CONTROL
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import TARGET_SUM, log_normalise, select_columns, text_values
from cellmill.data.genes.names import SEPARATOR, names_of_genes, perturbed_genes
from cellmill.errors import DataError
from cellmill.evaluate.components import pca
from cellmill.evaluate.evaluated import PCA_CELLS
from cellmill.evaluate.features import ROW_BLOCK
from cellmill.evaluate.inference.embed import inference
from cellmill.evaluate.methods import EMBEDDING, KNN
from cellmill.evaluate.scores import divide, seeded
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.genes import (
    LOADINGS,
    OF_GENES,
    UNTRAINED_OF_GENES,
    expression_statistics,
    gene_vectors,
    scaled_loadings,
)
from cellmill.models.gene_vectors import read_vectors
from cellmill.models.objectives.perturbation_response import PerturbationResponse
from cellmill.runs.results import ScoredMethod

MIN_CONTROLS = 5  # of a stratum, in each half
# of the ridge; the one of least leave-one-out error on the training units is taken
ALPHAS = np.logspace(-2, 4, 13)
MIN_KNOWN = 3  # training units with features that a linear prediction needs
Prediction = dict[ScoredMethod, np.ndarray]
MOST_CONTROLS = 128  # of a stratum: the first of the half that predictions start from
# expected counts from which the logarithm of the expectation is within 0.02 of the expected one
LARGE = 30.0
RESPONSE = replace(EMBEDDING, classifier="response head")
CO_EXPRESSION = ScoredMethod("co-expression of controls")
NO_CHANGE = ScoredMethod("no change")
MEAN = ScoredMethod("mean")
SAME_MEAN = ScoredMethod("same perturbation", "mean")
SAME_LINEAR = ScoredMethod("same perturbation", "linear")
SAME_NEAREST = ScoredMethod("same perturbation", "nearest")
# a group counts as unseen if this share of its cells is scored; the others equal training cells or
# have no known gene
UNSEEN_FRAC = 0.9
STRATA = ("batch", "donor")
Fold = tuple[int, np.ndarray, np.ndarray]  # repetition, training units, test units


@dataclass(frozen=True)
class Profiles:
    """Expression of all cells of a dataset, and their perturbations."""

    expression: sp.csr_matrix  # (cells, G) float32
    genes: np.ndarray  # (G,) int64: rows of the vocabulary
    depth: np.ndarray  # (cells,) int64: counts of these genes
    perturbation: np.ndarray  # (cells,) text; empty for controls and for cells without one
    dose: np.ndarray  # (cells,) text, empty without the role
    stratum: np.ndarray  # (cells,) int64; -1 for cells of a stratum with too few controls
    # (cells,) int8: 0 or 1 of controls, the half that they are in; -1 of other cells
    half: np.ndarray

    def control_means(self, half: int) -> np.ndarray:
        """(strata, G) float64: mean of the controls of a half."""
        return _means(
            self.expression, np.where(self.half == half, self.stratum, -1), self.stratum.max() + 1
        )

    def changes(self, unit: np.ndarray, n_units: int, controls: np.ndarray) -> np.ndarray:
        """(U, G) float64: mean over the cells of each unit, (cells,) int64, minus `controls` of
        their strata.

        Cells of unit -1, and without a stratum, take no part; a unit without cells has NaN.
        """
        unit = np.where(self.stratum == -1, -1, unit)
        return _means(self.expression, unit, n_units) - self.controls_of(unit, n_units, controls)

    def controls_of(self, unit: np.ndarray, n_units: int, controls: np.ndarray) -> np.ndarray:
        """(U, G) float64: mean of `controls`, (strata, G), over the strata of each unit's cells."""
        # a stratum without controls has no cells
        return self.strata_of(unit, n_units) @ np.nan_to_num(controls)

    def strata_of(self, unit: np.ndarray, n_units: int) -> np.ndarray:
        """(U, strata) float64: share of each stratum in the cells of a unit; NaN for a unit without
        cells.
        """
        cells = np.flatnonzero((unit >= 0) & (self.stratum != -1))
        shares = np.zeros((n_units, self.stratum.max() + 1))
        np.add.at(shares, (unit[cells], self.stratum[cells]), 1)
        return divide(shares, shares.sum(1, keepdims=True))


def read_profiles(context: Context, roles: Iterable[str]) -> Profiles:
    """Profiles of all cells of the dataset. `roles` divide cells into strata, as far as the dataset
    has them.
    """
    reader = context.reader
    genes = context.measured_genes
    target = context.columns.target
    target = np.where(target >= 0, np.searchsorted(genes, target), -1).astype(np.int32)
    counts = sp.vstack(
        [select_columns(block, target, len(genes)) for block in reader.rows(ROW_BLOCK)],
        format="csr",
    )
    is_control = context.roles[IS_CONTROL].fillna(False).to_numpy(bool)
    texts = {
        role: text_values(context.roles[role]).astype(str)
        for role in roles
        if role in context.roles
    }
    strata = np.zeros(reader.n_obs, np.int64)
    if texts:  # a number for each combination of values; missing values are one value
        strata = pd.DataFrame(texts).groupby([*texts], sort=True).ngroup().to_numpy(np.int64)
    half = np.full(reader.n_obs, -1, np.int8)
    generator = seeded(context.options.seed, 4)
    few = []
    for number in np.unique(strata):
        controls = generator.permutation(np.flatnonzero(is_control & (strata == number)))
        half[controls] = np.arange(len(controls)) % 2
        if len(controls) // 2 < MIN_CONTROLS:
            few.append(number)
    perturbation = text_values(context.roles[controlled_role(context)]).astype(str)
    return Profiles(
        expression=log_normalise(counts),
        genes=genes,
        depth=np.asarray(counts.sum(axis=1, dtype=np.int64)).ravel(),
        perturbation=np.where(is_control, "", perturbation),
        dose=text_values(context.roles["dose"]).astype(str)
        if "dose" in context.roles
        else np.full(reader.n_obs, ""),
        stratum=np.where(np.isin(strata, few), -1, strata),
        half=half,
    )


def prior_method(name: str) -> ScoredMethod:
    """Gene vectors of a file, one of `priors`."""
    return ScoredMethod(f"prior {name}")


def check_changes(context: Context) -> None:
    """Raise Skipped for a dataset without changes of expression."""
    if controlled_role(context) not in context.roles or IS_CONTROL not in context.roles:
        raise Skipped("the dataset has no perturbation and control columns")
    if context.reader.ordered:
        raise Skipped("sequences have no expression")
    values = context.roles[IS_CONTROL].dropna()
    if not values.isin([True, False]).all():
        raise DataError(
            f"{context.dataset}: obs column {IS_CONTROL!r}: expected True or False, got {values.iloc[0]!r}"
        )


def controlled_role(context: Context) -> str:
    """Role whose values are perturbations: as in the table, the condition of a dataset without
    perturbations.
    """
    return "perturbation" if "perturbation" in context.roles else "condition"


def _means(expression: sp.csr_matrix, group: np.ndarray, n_groups: int) -> np.ndarray:
    """(groups, G) float64: mean over the cells of each group; -1 is no group, and an empty group
    has NaN.
    """
    cells = np.flatnonzero(group >= 0)
    member = sp.csr_matrix(
        (np.ones(len(cells)), (group[cells], cells)), shape=(n_groups, expression.shape[0])
    )
    return divide(
        (member @ expression).toarray(), np.bincount(group[cells], minlength=n_groups)[:, None]
    )


def of_new_perturbations(
    changes: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    features: Mapping[ScoredMethod, np.ndarray],
    neighbors: int,
) -> Prediction:
    """Changes `(test units, G)` by method, of units whose perturbation no training unit has.

    `features` are `(U, F)`, NaN rows for units without any, which get the mean of the
    training units.
    """
    none = np.zeros((len(test), changes.shape[1]))
    predicted = {NO_CHANGE: none, MEAN: none + changes[train].mean(0)}
    for source, values in features.items():
        has = np.isfinite(values).all(1)
        known = train[has[train]]
        wanted = np.flatnonzero(has[test])
        linear, nearest, several = (predicted[MEAN].copy() for _ in range(3))
        if len(known) >= MIN_KNOWN and len(wanted):
            scaler = StandardScaler().fit(values[known])
            given = scaler.transform(values[known])
            queries = scaler.transform(values[test[wanted]])
            linear[wanted] = RidgeCV(ALPHAS).fit(given, changes[known]).predict(queries)
            similar = known[
                np.argsort(-_directions(queries) @ _directions(given).T, axis=1, kind="stable")
            ]
            nearest[wanted] = changes[similar[:, 0]]
            several[wanted] = changes[similar[:, :neighbors]].mean(1)
        predicted |= {
            replace(source, classifier="linear"): linear,
            replace(source, classifier="nearest"): nearest,
            replace(source, classifier=KNN): several,
        }
    return predicted


def _directions(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)


def of_new_contexts(
    changes: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    perturbation: np.ndarray,
    states: np.ndarray,
) -> Prediction:
    """Changes `(test units, G)` by method, of units of contexts, such as donors, that no training
    unit has.

    `perturbation` `(U,)` names each unit's, `states` `(U, G)` are its controls. A perturbation
    without a training unit gets the mean of the training units.
    """
    none = np.zeros((len(test), changes.shape[1]))
    mean = none + changes[train].mean(0)
    same_mean = mean.copy()
    nearest = mean.copy()
    for at, unit in enumerate(test):
        same = train[perturbation[train] == perturbation[unit]]
        if len(same):
            same_mean[at] = changes[same].mean(0)
            nearest[at] = changes[same[np.abs(states[same] - states[unit]).mean(1).argmin()]]
    one_hot = (perturbation[:, None] == np.unique(perturbation[train])).astype(float)
    linear = RidgeCV(ALPHAS).fit(one_hot[train], changes[train]).predict(one_hot[test])
    return {
        NO_CHANGE: none,
        MEAN: mean,
        SAME_MEAN: same_mean,
        SAME_LINEAR: linear,
        SAME_NEAREST: nearest,
    }


def predicted_changes(
    context: Context,
    profiles: Profiles,
    strata: np.ndarray,
    names: Sequence[str],
    genes: Sequence[list[int]],
) -> np.ndarray | None:
    """(U, G) float64: predicted change of each unit; None for a model that predicts no responses.

    `strata` (U, strata) are the share of each stratum in the cells of a unit, `names` and `genes`
    the perturbation of each unit and the vocabulary rows of its genes.
    """
    network = context.model.network
    parts = network.objective.leaves().values()
    objective = next((part for part in parts if isinstance(part, PerturbationResponse)), None)
    if objective is None:
        return None
    device = next(network.parameters()).device

    def expression(cells: np.ndarray, name: str | None, rows: list[int]) -> np.ndarray:
        """(G,): mean expected expression of control cells under a perturbation, or as they are
        (None).
        """
        with inference(device, context.options.precision):
            vectors = torch.from_numpy(context.vectors[cells]).to(device)
            log_shares = objective.log_profile(
                network, vectors, name, [row + len(SPECIAL) for row in rows]
            )
            in_dataset = log_shares[:, torch.from_numpy(profiles.genes)]
            shares = in_dataset.double().softmax(1).cpu().numpy()
        return expected_log_expression(shares, profiles.depth[cells]).mean(0)

    changes = np.zeros((len(names), len(profiles.genes)))
    for stratum in np.flatnonzero(strata.sum(0)).tolist():
        usable = (
            (profiles.half == 0)
            & (profiles.stratum == stratum)
            & np.isfinite(context.vectors).all(1)
        )
        cells = np.flatnonzero(usable)[:MOST_CONTROLS]
        before = expression(cells, None, [])
        by_name: dict[str, np.ndarray] = {}  # doses of a perturbation are predicted alike
        for unit in np.flatnonzero(strata[:, stratum]).tolist():
            name = names[unit]
            if name not in by_name:
                by_name[name] = expression(cells, name, genes[unit]) - before
            changes[unit] += strata[unit, stratum] * by_name[name]
    return changes


def expected_log_expression(shares: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """(C, G) float64: mean of log(1 + k * 10,000 / depth) over Poisson counts k of mean depth *
    share.

    Summed over k, because the expectation of a logarithm is not the logarithm of the expectation.
    """
    mean = depth[:, None] * shares
    scale = TARGET_SUM / np.maximum(depth, 1)[:, None]
    small = np.minimum(mean, LARGE)
    last = int(np.ceil(small.max(initial=0) + 8 * small.max(initial=0) ** 0.5)) + 5
    probability = np.exp(-small)
    total = np.zeros_like(mean)
    for count in range(1, last + 1):
        probability = probability * small / count
        total += probability * np.log1p(count * scale)
    return np.where(mean < LARGE, total, np.log1p(mean * scale))


@dataclass(frozen=True)
class HeldOut:
    """Units of a role whose values are held out whole, and what predicts their changes.

    A unit is a perturbation, its dose, and its context if contexts are held out.
    """

    context: Context
    config: PerturbationConfig
    role: str
    profiles: Profiles
    # (cells,) int64: its unit; -1 for controls, and for units with too few cells
    unit_of_cell: np.ndarray
    perturbation: np.ndarray  # (U,) text
    group: np.ndarray  # (U,) text: what is held out whole, the perturbation or the context
    unseen: np.ndarray  # (U,) bool: of a group that the model saw no cell of
    # (U,) bool: of a group with cells that the model was fitted on, not only validated
    trained: np.ndarray
    left_out: list[str]

    @classmethod
    def of(
        cls,
        context: Context,
        config: PerturbationConfig,
        role: str,
        profiles: Profiles | None = None,
    ) -> Self:
        """Units of at least `min_cells` cells; of units that may be tested, of scored cells.

        `profiles` are those of the dataset, if they are known. Raises Skipped where no stratum has
        enough controls.
        """
        if profiles is None:
            profiles = read_profiles(
                context, dict.fromkeys([*STRATA, *([] if role == "perturbation" else [role])])
            )
        if profiles.stratum.max() < 0:
            raise Skipped("no stratum has enough controls")
        perturbation = profiles.perturbation
        value = (
            perturbation if role == "perturbation" else text_values(context.roles[role]).astype(str)
        )
        usable = (perturbation != "") & (profiles.stratum >= 0)
        if role != "perturbation":
            usable &= context.roles[role].notna().to_numpy()
        groups, group = np.unique(value, return_inverse=True)
        n_cells = np.bincount(group[usable], minlength=len(groups))
        n_scored = np.bincount(group[usable & context.scored], minlength=len(groups))
        names = np.array([" | ".join(parts) for parts in zip(perturbation, profiles.dose, value)])
        units, first, unit = np.unique(names, return_index=True, return_inverse=True)
        unseen = (n_scored >= UNSEEN_FRAC * n_cells)[group[first]]
        is_trained = context.model.is_training_cell(context.dataset, context.reader.obs.index)
        trained = (np.bincount(group[usable & is_trained], minlength=len(groups)) > 0)[group[first]]
        counted = usable & (context.scored | ~unseen[unit])
        enough = np.bincount(unit[counted], minlength=len(units)) >= config.min_cells
        has_cells = np.bincount(unit[usable], minlength=len(units)) > 0
        kept = np.flatnonzero(enough & has_cells)
        return cls(
            context,
            config,
            role,
            profiles,
            unit_of_cell=np.where(usable & enough[unit], np.searchsorted(kept, unit), -1),
            perturbation=perturbation[first[kept]],
            group=value[first[kept]],
            unseen=unseen[kept],
            trained=trained[kept],
            left_out=sorted(
                {str(perturbation[first[at]]) for at in np.flatnonzero(has_cells & ~enough)}
            ),
        )

    def folds(self) -> Iterator[Fold]:
        """Units to fit on and to test; none where the model saw cells of all groups, or groups are
        too few.

        Where the model was fitted on some groups, so are the baselines: not on those that only
        validated it.
        """
        options = self.context.options
        groups = np.unique(self.group)
        unseen = np.unique(self.group[self.unseen])
        every = np.arange(len(self.group))
        if len(groups) < 2 or not len(unseen):
            return
        if len(unseen) < len(groups):
            seen = ~self.unseen
            fitted = seen & self.trained
            if fitted.any():
                seen = fitted
            yield 0, every[seen], every[self.unseen]
        elif self.role == "perturbation":
            for repetition in range(self.config.seeds):
                n = min(options.folds, len(groups))
                seed = options.seed + repetition
                for _, test in KFold(n, shuffle=True, random_state=seed).split(groups):
                    tested = np.isin(self.group, groups[test])
                    yield repetition, every[~tested], every[tested]
        else:
            for train, test in GroupKFold(min(len(groups), self.config.most_folds)).split(
                every, groups=self.group
            ):
                yield 0, train, test

    @cached_property
    def scored_unit(self) -> np.ndarray:
        """(cells,) int64: unit of each scored cell, from which changes are measured; -1 of other
        cells.
        """
        return np.where(self.context.scored, self.unit_of_cell, -1)

    @cached_property
    def genes(self) -> list[list[int]]:
        """Rows of the vocabulary of each unit's perturbed genes."""
        rows = perturbed_genes(sorted(set(self.perturbation)), self.context.model.vocabulary)
        return [rows[name] for name in self.perturbation]

    @cached_property
    def start_means(self) -> np.ndarray:
        """(strata, G) float64: mean of the controls that predictions start from."""
        return self.profiles.control_means(0)

    @cached_property
    def fitted_changes(self) -> np.ndarray:
        """(U, G) float64: changes from these controls, which predictions are fitted on."""
        return self.profiles.changes(self.unit_of_cell, len(self.group), self.start_means)

    @cached_property
    def features(self) -> dict[ScoredMethod, np.ndarray]:
        """(U, F) by source of gene vectors: mean over a unit's perturbed genes, NaN for a unit
        without a vector.

        Sources are the model, the correlation of genes over the controls that predictions start
        from, and the files of `config.priors`. Raises DataError for a file that cannot be used.
        """
        model = self.context.model
        vectors = gene_vectors(model)
        by_gene = {LOADINGS: scaled_loadings(model.components)}
        for source in (OF_GENES, UNTRAINED_OF_GENES):
            if source in vectors:
                by_gene[source] = vectors[source]
        by_gene[CO_EXPRESSION] = self._co_expression()
        features = {source: _of_units(self.genes, values) for source, values in by_gene.items()}
        return features | {
            prior_method(name): self._prior(Path(path)) for name, path in self.config.priors.items()
        }

    def _co_expression(self) -> np.ndarray:
        """(V, F): loadings of the correlation of genes over the starting controls; NaN for genes
        not measured.
        """
        starts = (self.profiles.half == 0) & (self.profiles.stratum >= 0)
        controls = self.profiles.expression[np.flatnonzero(starts)[:PCA_CELLS]]
        spread = expression_statistics(controls)[:, 1]
        standard = controls @ sp.diags(
            np.divide(1, spread, out=np.zeros_like(spread), where=spread > 0)
        )
        measured = scaled_loadings(pca(standard.shape).fit(sp.csr_matrix(standard)))
        loadings = np.full((self.context.model.vocabulary.n_genes, measured.shape[1]), np.nan)
        loadings[self.profiles.genes] = measured
        return loadings

    def _prior(self, path: Path) -> np.ndarray:
        """(U, F): mean over a unit's perturbed genes of their vectors in the file, also of genes
        not measured.
        """
        vocabulary = self.context.model.vocabulary
        parts = [[part.strip() for part in name.split(SEPARATOR)] for name in self.perturbation]
        named = names_of_genes((part for of_unit in parts for part in of_unit), vocabulary)
        genes = [*zip(vocabulary.gene_ids, vocabulary.symbols)]
        vectors = read_vectors(path, [*genes, *named.values()])[len(genes) :].double().numpy()
        row = {part: at for at, part in enumerate(named) if np.isfinite(vectors[at]).all()}
        return _of_units(
            [[row[part] for part in of_unit if part in row] for of_unit in parts], vectors
        )

    def predictions(self, folds: list[Fold]) -> Iterator[tuple[int, np.ndarray, Prediction]]:
        """Repetition, test units and their predicted changes by method, `(test units, G)`, of each
        fold.
        """
        states = self.profiles.controls_of(self.unit_of_cell, len(self.group), self.start_means)
        shares = np.nan_to_num(self.profiles.strata_of(self.scored_unit, len(self.group)))
        responses = predicted_changes(
            self.context, self.profiles, shares, self.perturbation.tolist(), self.genes
        )
        for repetition, train, test in folds:
            if self.role == "perturbation":
                predicted = of_new_perturbations(
                    self.fitted_changes, train, test, self.features, self.config.neighbors
                )
            else:
                predicted = of_new_contexts(
                    self.fitted_changes, train, test, self.perturbation, states
                )
            if responses is not None:
                predicted[RESPONSE] = responses[test]
            yield repetition, test, predicted


def _of_units(genes: Iterable[list[int]], values: np.ndarray) -> np.ndarray:
    """(U, F): mean of `values` over the rows of each unit's genes; NaN for a unit without any."""
    rows = [
        values[of_unit].mean(0) if of_unit else np.full(values.shape[1], np.nan)
        for of_unit in genes
    ]
    return np.array(rows, np.float64).reshape(-1, values.shape[1])
