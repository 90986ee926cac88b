"""Units of perturbed cells that are held out whole, and the predictions of their changes.

A unit is a perturbation with its dose, and with its context (such as a donor) if contexts are held
out or a file divides them. Predictions of a tested unit read its gene, its context and the strata of
its cells, never its expression.

Legend: U units, G genes, V genes of the vocabulary, F features of a unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.model_selection import GroupKFold, KFold

from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.data.arrays import text_values
from cellmill.data.genes.names import SEPARATOR, names_of_genes, perturbed_genes
from cellmill.evaluate.evaluated_model import PCA_CELLS
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.methods import EMBEDDING, ByMethod
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.gene_vectors import (
    GENE_VECTORS,
    LOADINGS,
    UNTRAINED_GENE_VECTORS,
    expression_statistics,
    gene_vectors,
    scaled_loadings,
)
from cellmill.evaluate.tasks.perturbation.baselines import (
    ADDITIVE,
    CONTEXT_MEAN,
    ChangesByMethod,
    predict_new_contexts,
    predict_new_perturbations,
    sum_changes_of_parts,
)
from cellmill.evaluate.tasks.perturbation.doses import (
    leave_out_doses,
    log_doses,
    parse_names,
    predict_new_doses,
)
from cellmill.evaluate.tasks.perturbation.profiles import START, Profiles, read_profiles
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.evaluate.tasks.perturbation.split_file import TEST, TRAIN, SplitFile
from cellmill.models.gene_vectors import read_vectors
from cellmill.runs.results import ScoredMethod

PERTURBATION = "perturbation"  # role whose perturbations are held out, such as by a split file
DOSE = "dose"  # role of doses that are held out
STRATA = ("batch", "donor")  # roles that divide cells into strata
# a group counts as unseen if this share of its cells is scored; the rest equal training cells or
# have no known gene
UNSEEN_FRAC = 0.9
RESPONSE = replace(EMBEDDING, classifier="response head")
CO_EXPRESSION = ScoredMethod("co-expression of controls")


def prior_method(name: str) -> ScoredMethod:
    """Gene vectors of a file, one of `priors`."""
    return ScoredMethod(f"prior {name}")


@dataclass(frozen=True)
class HeldOut:
    """Units of a role whose values are held out whole, and what predicts their changes."""

    context: Context
    config: PerturbationConfig
    role: str
    profiles: Profiles
    # (cells,) int64: unit of a cell; -1 for controls, and for units with too few cells
    unit_of_cell: np.ndarray
    name_in_dataset: np.ndarray  # (U,) text: perturbation as the dataset has it
    perturbation: np.ndarray  # (U,) text: the same, or the compound if names have doses
    dose: np.ndarray  # (U,) text, empty for a unit without
    unit_context: np.ndarray  # (U,) text, empty if units have none
    # (U,) text: perturbation, context or both; the units of a group are held out together
    group_of_unit: np.ndarray
    unseen: np.ndarray  # (U,) bool: the model saw no cell of the group
    # (U,) bool: the model was fitted, not only validated, on cells of the group
    trained: np.ndarray
    # perturbations of units with too few cells, or without the dose that is held out
    left_out: list[str]
    split_file: SplitFile | None = None

    @classmethod
    def read(
        cls,
        context: Context,
        config: PerturbationConfig,
        role: str,
        split_file: SplitFile | None = None,
    ) -> Self:
        """Units with at least `min_cells` cells. For units that may be tested, only scored cells
        count.

        Raises Skipped if no stratum has enough controls.
        """
        context_role = None if role in (PERTURBATION, DOSE) else role
        if split_file is not None:
            context_role = split_file.context_role
        roles = (*STRATA, context_role) if context_role else STRATA
        profiles = read_profiles(
            context.reader,
            context.gene_columns,
            context.roles,
            dict.fromkeys(roles),
            context.options.seed,
        )
        if profiles.stratum.max() < 0:
            raise Skipped("no stratum has enough controls")
        cells = _tabulate_cells(context, config, profiles, context_role)
        no_dose: list[str] = []
        if split_file is not None:
            cells["group"] = cells["perturbation"] + " | " + cells["context"]
        if role == DOSE:
            cells["group"] = cells["perturbation"] + " | " + cells["dose"]
            has_dose = np.isfinite(log_doses(cells["dose"].to_numpy(str)))
            no_dose = cells["perturbation"][cells["is_usable"] & ~has_dose].unique().tolist()
            cells["is_usable"] &= has_dose
        usable = cells[cells["is_usable"]]
        groups = usable.groupby("group")
        is_unseen = groups["is_scored"].sum() >= UNSEEN_FRAC * groups.size()
        is_trained = groups["is_trained"].any()
        units = _count_cells_of_units(usable, is_unseen)
        has_enough = units["n_cells"] >= config.min_cells
        kept = units[has_enough]
        unit_of_cell = kept.index.get_indexer(cells["unit"])
        return cls(
            context,
            config,
            role,
            profiles,
            unit_of_cell=np.where(cells["is_usable"], unit_of_cell, -1),
            name_in_dataset=kept["name_in_dataset"].to_numpy(str),
            perturbation=kept["perturbation"].to_numpy(str),
            dose=kept["dose"].to_numpy(str),
            unit_context=kept["context"].to_numpy(str),
            group_of_unit=kept["group"].to_numpy(str),
            unseen=is_unseen[kept["group"]].to_numpy(bool),
            trained=is_trained[kept["group"]].to_numpy(bool),
            left_out=sorted({*units["perturbation"][~has_enough], *no_dose}),
            split_file=split_file,
        )

    def folds_by_heading(self) -> dict[str, list[Fold]]:
        """Folds by what they test, in the words of a heading, such as `new donor`. A split file has
        a heading for each novelty of units. Empty if nothing can be tested.
        """
        if self.split_file is None:
            folds = [*self.folds()]
            return {f"new {self.role}": folds} if folds else {}
        train = np.flatnonzero(self.split_of_unit == TRAIN)
        test = np.flatnonzero((self.split_of_unit == TEST) & self.unseen)
        by_novelty = self.split_file.divide_by_novelty(
            test, train, self.perturbation, self.unit_context
        )
        return {novelty: [Fold(0, train, units)] for novelty, units in by_novelty.items()}

    @cached_property
    def split_of_unit(self) -> np.ndarray:
        """(U,) text: split of each unit in the file; empty for a unit that it does not name."""
        assert self.split_file is not None
        return self.split_file.assign(self.perturbation, self.unit_context)

    @cached_property
    def log_dose(self) -> np.ndarray:
        """(U,) float64: log10 of each unit's dose; NaN for a unit without a dose above 0."""
        return log_doses(self.dose)

    @cached_property
    def unit_names(self) -> list[str]:
        """Perturbation, dose and context of each unit, as far as it has them."""
        texts = zip(self.perturbation.tolist(), self.dose.tolist(), self.unit_context.tolist())
        return [" | ".join(filter(None, unit_texts)) for unit_texts in texts]

    def folds(self) -> Iterator[Fold]:
        """Units to fit on and to test. Empty if the model saw cells of all groups, or if there are
        fewer than two groups.

        If the model was fitted on some groups, baselines are fitted on the same groups, not on
        those that only validated the model.
        """
        options = self.context.options
        groups = np.unique(self.group_of_unit)
        unseen = np.unique(self.group_of_unit[self.unseen])
        units = np.arange(len(self.group_of_unit))
        if len(groups) < 2 or not len(unseen):
            return
        if len(unseen) < len(groups):
            fitted = ~self.unseen & self.trained
            if not fitted.any():
                fitted = ~self.unseen
            yield Fold(0, units[fitted], units[self.unseen])
        elif self.role == DOSE:
            for test in leave_out_doses(self.perturbation, self.log_dose):
                yield Fold(0, np.setdiff1d(units, test), test)
        elif self.role == PERTURBATION:
            n_folds = min(options.folds, len(groups))
            for repetition in range(self.config.seeds):
                splitter = KFold(n_folds, shuffle=True, random_state=options.seed + repetition)
                for _, test in splitter.split(groups):
                    is_tested = np.isin(self.group_of_unit, groups[test])
                    yield Fold(repetition, units[~is_tested], units[is_tested])
        else:
            splitter = GroupKFold(min(len(groups), self.config.most_folds))
            for train, test in splitter.split(units, groups=self.group_of_unit):
                yield Fold(0, train, test)

    def explain_no_folds(self) -> str:
        """Why there are no folds, if there are none."""
        n_groups = len(np.unique(self.group_of_unit))
        reason = f"{n_groups} values have {self.config.min_cells} cells (min_cells); two are needed"
        if n_groups and (self.split_file is not None or not self.unseen.any()):
            reason = "the model saw cells of each of them; divide its corpus by it (shard.split_by), or use cells: all"
        return f"held out {self.role}: {reason}"

    @cached_property
    def scored_unit_of_cell(self) -> np.ndarray:
        """(cells,) int64: unit of each scored cell, from which changes are measured; -1 for other
        cells.
        """
        return np.where(self.context.scored, self.unit_of_cell, -1)

    @cached_property
    def genes(self) -> list[list[int]]:
        """Vocabulary rows of each unit's perturbed genes."""
        rows = perturbed_genes(sorted(set(self.perturbation)), self.context.model.vocabulary)
        return [rows[name] for name in self.perturbation]

    @cached_property
    def start_means(self) -> np.ndarray:
        """(strata, G) float64: mean of the controls that predictions start from."""
        return self.profiles.control_means(START)

    @cached_property
    def fitted_changes(self) -> np.ndarray:
        """(U, G) float64: changes from `start_means`, which predictions are fitted on."""
        return self.profiles.changes(self.unit_of_cell, len(self.group_of_unit), self.start_means)

    @cached_property
    def features(self) -> ByMethod:
        """(U, F) by source of gene vectors: mean over a unit's perturbed genes, NaN for a unit
        without a vector.

        Sources are the model, the correlation of genes over the controls that predictions start
        from, and the files of `config.priors`. Raises DataError for an unusable file.
        """
        model = self.context.model
        vectors = gene_vectors(model)
        by_gene = {LOADINGS: scaled_loadings(model.components)}
        for source in (GENE_VECTORS, UNTRAINED_GENE_VECTORS):
            if source in vectors:
                by_gene[source] = vectors[source]
        by_gene[CO_EXPRESSION] = self._correlate_controls()
        features = {source: _average_rows(self.genes, table) for source, table in by_gene.items()}
        for name, path in self.config.priors.items():
            features[prior_method(name)] = self._read_prior(Path(path))
        return features

    def _correlate_controls(self) -> np.ndarray:
        """(V, F): loadings of the correlation of genes over the starting controls; NaN for genes
        not measured.
        """
        is_start = (self.profiles.half == START) & (self.profiles.stratum >= 0)
        controls = self.profiles.expression[np.flatnonzero(is_start)[:PCA_CELLS]]
        # components of genes with unit variance are those of their correlation
        sd = expression_statistics(controls)[:, 1]
        weight = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
        standard = sp.csr_matrix(controls @ sp.diags(weight))
        measured = scaled_loadings(pca(standard.shape).fit(standard))
        loadings = np.full((self.context.model.vocabulary.n_genes, measured.shape[1]), np.nan)
        loadings[self.profiles.genes] = measured
        return loadings

    def _read_prior(self, path: Path) -> np.ndarray:
        """(U, F): mean over a unit's perturbed genes of their vectors in the file, also of genes
        not measured.
        """
        vocabulary = self.context.model.vocabulary
        parts = []  # names of each unit's perturbed genes
        names = []
        for perturbation in self.perturbation:
            parts.append([part.strip() for part in perturbation.split(SEPARATOR)])
            names += parts[-1]
        named = names_of_genes(names, vocabulary)
        # read for all genes of the model too: a file that has none of them is an error
        genes = [*zip(vocabulary.gene_ids, vocabulary.symbols)]
        vectors = read_vectors(path, [*genes, *named.values()])[len(genes) :].double().numpy()
        row_of_name = {}
        for row, name in enumerate(named):
            if np.isfinite(vectors[row]).all():
                row_of_name[name] = row
        rows = []
        for unit_parts in parts:
            rows.append([row_of_name[part] for part in unit_parts if part in row_of_name])
        return _average_rows(rows, vectors)

    @cached_property
    def responses(self) -> np.ndarray | None:
        """(U, G) float64: change of each unit by the model's response head, if it has one."""
        context = self.context
        head = ResponseHead.find(context.model.network, context.options.precision)
        if head is None:
            return None
        n_units = len(self.group_of_unit)
        shares = np.nan_to_num(self.profiles.stratum_shares(self.scored_unit_of_cell, n_units))
        names = self.name_in_dataset.tolist()
        return head.predict_changes(context.vectors, self.profiles, shares, names, self.genes)

    def predictions(self, folds: list[Fold]) -> Iterator[ChangesByMethod]:
        """Predicted changes of the test units of each fold."""
        for fold in folds:
            predicted: ChangesByMethod = {}
            if self.role == PERTURBATION:
                predicted |= predict_new_perturbations(
                    self.fitted_changes, fold.train, fold.test, self.features, self.config.neighbors
                )
            if self.split_file is not None:
                predicted |= self._predict_from_parts(fold)
            if self.role == DOSE:
                predicted |= predict_new_doses(
                    self.fitted_changes, fold.train, fold.test, self.perturbation, self.log_dose
                )
            elif self.role != PERTURBATION or self._is_trained_elsewhere(fold):
                n_units = len(self.group_of_unit)
                controls = self.profiles.unit_controls(self.unit_of_cell, n_units, self.start_means)
                predicted |= predict_new_contexts(
                    self.fitted_changes, fold.train, fold.test, self.perturbation, controls
                )
            if self.responses is not None:
                predicted[RESPONSE] = self.responses[fold.test]
            yield predicted

    def _is_trained_elsewhere(self, fold: Fold) -> bool:
        """True if a training unit has the perturbation of a test unit."""
        return bool(np.isin(self.perturbation[fold.test], self.perturbation[fold.train]).any())

    def _predict_from_parts(self, fold: Fold) -> ChangesByMethod:
        """Means of the units' contexts, and sums over the parts of combinations, each only if all
        test units have it.
        """
        assert self.split_file is not None
        parts = [self.split_file.names.divide(name) for name in self.perturbation.tolist()]
        predicted: ChangesByMethod = {}
        if any(self.unit_context):
            is_same = self.unit_context[fold.test][:, None] == self.unit_context[fold.train]
            n_same = is_same.sum(1, keepdims=True)
            if n_same.all():
                predicted[CONTEXT_MEAN] = is_same @ self.fitted_changes[fold.train] / n_same
        if max(len(parts[unit]) for unit in fold.test) > 1:
            sums = sum_changes_of_parts(
                self.fitted_changes,
                fold.train,
                fold.test,
                self.perturbation,
                self.unit_context,
                parts,
            )
            if np.isfinite(sums).all():
                predicted[ADDITIVE] = sums
        return predicted


def _tabulate_cells(
    context: Context, config: PerturbationConfig, profiles: Profiles, context_role: str | None
) -> pd.DataFrame:
    """A row for each cell: its unit and the values that name it, and whether the cell is usable,
    scored, and in the model's training.

    A cell is usable if it is perturbed, has a stratum, and has a value of `context_role`, the role of
    contexts. Units are held out by their context if they have one, else by their perturbation.
    """
    is_usable = (profiles.perturbation != "") & (profiles.stratum >= 0)
    contexts = np.full(len(is_usable), "")
    compound = profiles.perturbation
    dose = profiles.dose
    if config.doses == "names":
        compound, dose, _ = parse_names(compound, config.dose_unit)
    if context_role is not None:
        contexts = text_values(context.roles[context_role]).astype(str)
        is_usable &= context.roles[context_role].notna().to_numpy()
    cells = pd.DataFrame(
        {
            "name_in_dataset": profiles.perturbation,
            "perturbation": compound,
            "dose": dose,
            "context": contexts,
            "group": compound if context_role is None else contexts,
            "is_usable": is_usable,
            "is_scored": context.scored,
            "is_trained": context.model.is_training_cell(context.dataset, context.reader.obs_names),
        }
    )
    # one sortable name for each unit
    cells["unit"] = cells["perturbation"] + " | " + cells["dose"] + " | " + cells["context"]
    return cells


def _count_cells_of_units(usable: pd.DataFrame, is_unseen: pd.Series) -> pd.DataFrame:
    """Perturbation, dose, context, group and `n_cells` of each unit, by its name.

    Cells of a unit that may be tested, whose group `is_unseen`, count if they are scored, others
    always.
    """
    is_counted = usable["is_scored"] | ~is_unseen[usable["group"]].to_numpy(bool)
    units = usable.assign(is_counted=is_counted).groupby("unit")
    return units.agg(
        name_in_dataset=("name_in_dataset", "first"),
        perturbation=("perturbation", "first"),
        dose=("dose", "first"),
        context=("context", "first"),
        group=("group", "first"),
        n_cells=("is_counted", "sum"),
    )


def _average_rows(rows_by_unit: list[list[int]], table: np.ndarray) -> np.ndarray:
    """(U, F) float64: mean of `table` over the rows of each unit; NaN for a unit without rows."""
    means = np.full((len(rows_by_unit), table.shape[1]), np.nan)
    for unit, rows in enumerate(rows_by_unit):
        if rows:
            means[unit] = table[rows].mean(0)
    return means
