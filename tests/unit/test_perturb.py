"""Predicted responses of a file's controls equal what task perturbation scores; what cannot be
predicted is refused in a line.
"""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from safetensors.torch import load_file, save_file

import cellmill
from cellmill import open_cells
from cellmill.cli import main
from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.run import Embed
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.embed import InferenceModel, embed_cells, load_for_inference
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.perturbation.predictions import RESPONSE_HEAD, ChangePredictor
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.evaluate.tasks.perturbation.scoring import score_predictions
from cellmill.evaluate.tasks.perturbation.units import PerturbedUnits
from cellmill.files import sha256_file
from tests.unit.evaluated import make_context, with_config
from tests.unit.exported import export_model

N_TRAINED = 3  # genes that the model was trained on


class Screen:
    """A model, and cells under perturbations in two batches of unequal size, as a file and as a
    dataset under evaluation.
    """

    def __init__(self, folder: Path, corpus: dict[str, Path]) -> None:
        self.symbols = make_context(folder / "genes", corpus).model.vocabulary.symbols
        levels = (*self.symbols[:N_TRAINED], "drug_1uM", "control", self.symbols[5])
        options: dict[str, Any] = {"family": "profile", "heads": None, "layers": 1}
        options |= {"objective": "perturbation_response", "perturbation_column": "guide"}
        self.context: Context = make_context(
            folder, corpus, control="control", levels={"guide": levels}, **options
        )
        self.folder = folder / "model"
        self._draw_weights()
        model = self.context.model
        names = np.array([*self.symbols[:6], f"{self.symbols[1]}+{self.symbols[0]}", "control"])
        n_cells = self.context.reader.n_obs
        number = np.arange(n_cells) % 8
        self.cells = open_cells(corpus["cells"])
        del self.cells.obs["donor"]
        self.cells.obs["guide"] = names[number]
        self.cells.obs["batch"] = np.where(np.arange(n_cells) // 8 % 3 * number % 5 > 0, "x", "y")
        self.names = sorted({*names} - {"control"})
        network, *_ = load_for_inference(self.folder)
        obs = self.cells.obs.set_index(self.context.reader.obs.index)
        self.context = replace(
            self.context,
            model=replace(model, network=network),
            options=Evaluate.model_validate({}),
            scored=np.ones(n_cells, bool),
            roles={
                "perturbation": obs["guide"],
                "batch": obs["batch"],
                "is_control": obs["guide"] == "control",
            },
        )

    def _draw_weights(self) -> None:
        """Random responses; levels from the control on were not trained on."""
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        generator = torch.Generator().manual_seed(1)
        for name in ("response_genes.weight", "response_genes.bias", "response_terms.weight"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator) / 3
        tensors["response_terms.weight"][N_TRAINED + 1 :] = 0
        save_file(tensors, path)
        with_config(self.folder, weights_sha256=sha256_file(path))

    def perturb(self, *words: Any, **options: Any) -> ad.AnnData:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cellmill.load(self.folder).perturb(self.cells, *words, **options)


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Screen:
    return Screen(tmp_path_factory.mktemp("screen"), corpus)


def _hold_out(screen: Screen) -> PerturbedUnits:
    """Units of the task, with vectors of the controls that predictions start from."""
    config = PerturbationConfig(held_out=["perturbation"])
    context = screen.context
    profiles = PerturbedUnits.read(context, config, "perturbation").profiles
    is_read = np.zeros(context.reader.n_obs, bool)
    for stratum in (0, 1):
        cells = np.flatnonzero((profiles.half == 0) & (profiles.stratum == stratum))
        is_read[cells[:128]] = True
    model = context.model
    section = Embed.model_validate({})
    loaded = InferenceModel(model.network, model.vocabulary, model.tokens, model.config)
    embedding = embed_cells(context.reader, loaded, section, is_read)
    vectors = np.full((len(is_read), 16), np.nan, np.float32)
    vectors[is_read] = embedding.vectors
    return PerturbedUnits.read(replace(context, vectors=vectors), config, "perturbation")


def test_responses_are_those_that_the_task_scores(screen: Screen) -> None:
    response = screen.perturb(screen.names)
    held = _hold_out(screen)
    predictor = ChangePredictor(held)
    assert predictor.responses is not None
    units = [held.perturbation.tolist().index(name) for name in response.obs_names]
    assert sorted(units) == list(range(7))
    np.testing.assert_array_equal(response.X, predictor.responses[units].astype(np.float32))
    assert np.abs(response.X).max(1).min() > 1e-3
    is_trained = [name in screen.symbols[:N_TRAINED] for name in response.obs_names]
    assert response.obs["trained"].tolist() == is_trained
    assert response.uns["cellmill_response"]["strata"] == ["batch"]
    # scores of perturbations that are compared together
    tested = np.array(units)[~np.array(is_trained)]
    trained = np.setdiff1d(units, tested)
    fold = Fold(0, trained, tested)
    [predicted] = predictor.predict([fold])
    scores = score_predictions(held, [fold], [predicted])
    rows = {name.split(", ")[1]: name for name in response.obs if name.startswith("MAE")}
    methods = {method.name: method for method in predicted}
    by_row = {"the response": RESPONSE_HEAD, "the mean of other perturbations": methods["mean"]}
    for name, method in (by_row | {"no change": methods["no change"]}).items():
        for metric, by_method in scores.items():
            column = rows[name].replace("MAE", metric)
            if np.isfinite(by_method[method]).any():
                found = response.obs[column][~np.array(is_trained)].mean()
                assert found == pytest.approx(np.nanmean(by_method[method])), (name, metric)


def test_measured_changes_equal_plain_means(screen: Screen) -> None:
    response = screen.perturb(screen.names)
    held = _hold_out(screen)
    expression = held.profiles.expression.toarray().astype(float)
    guide = screen.cells.obs["guide"].to_numpy(str)
    batch = screen.cells.obs["batch"].to_numpy(str)
    for name in screen.names:
        changes = []
        starts = []
        for cell in np.flatnonzero(guide == name):
            same = batch == batch[cell]
            changes.append(expression[cell] - expression[same & (held.profiles.half == 1)].mean(0))
            starts.append(expression[same & (held.profiles.half == 0)].mean(0))
        row = response[name]
        np.testing.assert_allclose(row.layers["measured"][0], np.mean(changes, 0), atol=1e-5)
        np.testing.assert_allclose(row.layers["control"][0], np.mean(starts, 0), atol=1e-5)
        expected = np.maximum(row.layers["control"] + row.X, 0)
        np.testing.assert_allclose(row.layers["expression"], expected, atol=1e-6)
        symbols = [screen.symbols.index(part) for part in name.split("+")]
        is_scored = ~np.isin(held.profiles.genes, symbols)
        pearson = np.corrcoef(np.mean(changes, 0)[is_scored], row.X[0, is_scored])[0, 1]
        assert row.obs["Pearson, the response"].item() == pytest.approx(pearson, abs=1e-4)


def test_only_trained_perturbations_are_predicted_by_default(screen: Screen) -> None:
    model = cellmill.load(screen.folder)
    controls = screen.cells[screen.cells.obs["guide"] == "control"].copy()
    with pytest.warns(UserWarning, match="training"):
        response = model.perturb(controls)
    assert response.obs_names.tolist() == [*screen.symbols[:N_TRAINED], "drug_1uM"]
    assert response.obs["trained"].all()
    assert "measured" not in response.layers
    assert not [name for name in response.obs if "," in name]
    # cells without a column of perturbations are all controls
    del controls.obs["guide"]
    with pytest.warns(UserWarning, match="no obs column 'guide': all cells are taken as controls"):
        again = model.perturb(controls)
    np.testing.assert_array_equal(again.X, response.X)
    with pytest.warns(UserWarning, match="not trained on 2 perturbations, .* genes only: "):
        model.perturb(controls, [screen.symbols[5], screen.symbols[8]])


def test_a_value_of_a_column_has_a_response_of_its_own(screen: Screen) -> None:
    names = screen.names[:2]
    both = screen.perturb(names, by="batch")
    assert both.obs["batch"].tolist() == ["x", "y", "x", "y"]
    assert both.obs_names[0] == f"{names[0]} | x"
    assert list(both.uns["cellmill_response"]["strata"]) == ["batch"]
    held = _hold_out(screen)
    unit = [held.perturbation.tolist().index(name) for name in both.obs["perturbation"]]
    head = ResponseHead.find(screen.context.model.network, "32-true")
    assert head is not None
    expected = head.predict_changes(
        held.context.vectors,
        held.profiles,
        np.eye(2)[[0, 1, 0, 1]],
        [*both.obs["perturbation"]],
        [held.genes[number] for number in unit],
    )
    np.testing.assert_array_equal(both.X, expected.astype(np.float32))
    assert np.abs(both.X[0] - both.X[1]).max() > 1e-3
    n_cells = screen.cells.obs.groupby(["guide", "batch"], observed=True).size()
    pairs = zip(both.obs["perturbation"], both.obs["batch"])
    assert both.obs["n_cells"].tolist() == [n_cells.get(pair, 0) for pair in pairs]


def test_a_combination_has_one_name(screen: Screen) -> None:
    first, second = screen.symbols[:2]
    reference = screen.perturb([f"{min(first, second)}+{max(first, second)}"])
    for text in (f"{second}+{first}", f"{first}, {second}".replace(" ", ""), f"{second}_{first}"):
        found = screen.perturb([text])
        assert found.obs_names.tolist() == reference.obs_names.tolist()
        np.testing.assert_array_equal(found.X, reference.X)
        assert found.obs["n_cells"].item() == 75
    reference = screen.perturb([first])
    for given in (first, [f" {first} "]):
        np.testing.assert_array_equal(screen.perturb(given).X, reference.X)


def test_the_command_writes_what_python_gives(
    screen: Screen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "cells.h5ad"
    screen.cells.write_h5ad(given)
    out = tmp_path / "out.h5ad"
    words = ["perturb", "--model", str(screen.folder), "--input", str(given), "--out", str(out)]
    assert main([*words, "--perturbations", *screen.names]) == 0
    printed = capsys.readouterr().out
    written = ad.read_h5ad(out)
    expected = screen.perturb(screen.names)
    np.testing.assert_array_equal(written.X, expected.X)
    pd.testing.assert_frame_equal(written.var, expected.var)
    pd.testing.assert_frame_equal(written.obs, expected.obs, check_categorical=False)
    assert {*written.layers} == {"control", "expression", "measured"}
    n_genes = expected.n_vars
    n_controls = expected.uns["cellmill_response"]["n_controls"]
    assert (
        f"cells: response of {n_genes} genes to 7 perturbations, predicted from {n_controls} controls, by batch -> "
        f"{out}\n" in printed
    )
    for heading in ("4 measured perturbations that the model was not trained on", "3 measured"):
        for metric in ("Pearson of the change: the response ", "mean absolute error: the response"):
            assert any(heading in line and metric in line for line in printed.splitlines())
    assert re.search("the response (is|against) .*the mean of other perturbations", printed)
    assert "the comparison may be on training cells: " in printed
    before = given.read_bytes()
    assert main([*words[:-1], str(given)]) == 2
    assert given.read_bytes() == before


def test_what_cannot_be_predicted_is_refused(screen: Screen, corpus: dict[str, Path]) -> None:
    gene = screen.symbols[0]
    for names, message in (
        (
            [f"{gene}x"],
            rf"not trained on '{gene}x' and has no gene {gene}x, .*did you mean '{gene}'",
        ),
        ([f"{gene}+nothing"], r"not trained on '.*\+nothing' and has no gene nothing, so"),
        (["drug_5uM"], r"'drug_5uM': the model was trained on drug_1uM and predicts no other dose"),
        (["drug"], r"'drug': the model was trained on drug_1uM and predicts no other dose"),
        ([gene, " "], "expected names, got an empty one"),
        (["control"], "'control' is the control, which has no response; leave it out"),
    ):
        with pytest.raises(ConfigError, match=f"^perturbations: .*{message}"):
            screen.perturb(names)
    with pytest.raises(
        DataError, match=r"expected controls named 'mock' in obs column 'guide', got"
    ):
        screen.perturb(control="mock")
    with pytest.raises(DataError, match=r"no obs column 'guides' \(--perturbation-column\)"):
        screen.perturb(perturbation_column="guides")
    with pytest.raises(DataError, match=r"no obs column 'types' \(--by\)"):
        screen.perturb(by="types")
    for name in ("guide", "perturbation", "trained", "n_cells"):  # would be lost in the output
        with pytest.raises(ConfigError, match=f"^--by: .*, got '{name}'; rename yours"):
            screen.perturb(by=name)
    screen.cells.obs["one"] = np.arange(screen.cells.n_obs)
    with pytest.raises(
        DataError, match=r"expected 10 controls in a group of batch and one, got 75 "
    ):
        screen.perturb(by="one")
    with pytest.raises(ConfigError, match=r"^perturb: unknown argument 'genes'"):
        screen.perturb(genes=[gene])
    other = export_model(screen.folder.parent / "other", corpus["vocabulary"])
    with pytest.raises(ConfigError, match=r"other: it predicts no responses; export a run with"):
        cellmill.load(other).perturb(screen.cells)


def _copy(screen: Screen, **columns: Any) -> ad.AnnData:
    """The cells of the screen, with other obs columns."""
    cells = screen.cells.copy()
    for name, values in columns.items():
        cells.obs[name] = values
    return cells


def test_a_batch_whose_controls_have_no_counts_is_left_out(screen: Screen) -> None:
    cells = _copy(screen)
    is_control = (cells.obs["guide"] == "control").to_numpy()
    in_y = (cells.obs["batch"] == "y").to_numpy()
    counts = cells.X.toarray()
    counts[is_control & in_y] = 0
    cells.X = sp.csr_matrix(counts)
    model = cellmill.load(screen.folder)
    n = int((is_control & in_y).sum())
    message = rf"adata: {n} controls are left out: .* batch has fewer than 10, or none with counts"
    with pytest.warns(UserWarning, match=message):
        response = model.perturb(cells, screen.names[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.perturb(cells[~in_y], screen.names[:2])
    np.testing.assert_allclose(response.X, expected.X, atol=1e-6)
    assert np.isfinite(response.X).all()
    assert response.obs["n_cells"].tolist() == expected.obs["n_cells"].tolist()
    counts[is_control] = 0
    cells.X = sp.csr_matrix(counts)
    message = f"adata: none of its {is_control.sum()} controls has a count on a gene that the model"
    with pytest.raises(DataError, match=message):
        model.perturb(cells)


def test_a_control_that_was_trained_on_as_perturbation_warns(screen: Screen) -> None:
    gene = screen.symbols[0]
    model = cellmill.load(screen.folder)
    message = (
        f"trained on the control '{gene}' as a perturbation: predicted responses are changes from 'control', "
        f"measured ones from '{gene}'"
    )
    with pytest.warns(UserWarning, match=message):
        response = model.perturb(screen.cells, control=gene)
    assert gene not in response.obs_names
    assert response.uns["cellmill_response"]["control"] == gene
    for name in (gene, "control"):
        with pytest.raises(ConfigError, match=f"'{name}' is the control, which has no response"):
            screen.perturb([name], control=gene)


def test_a_gene_trained_on_by_its_name_is_refused_in_pairs(screen: Screen) -> None:
    gene = screen.symbols[0]
    message = "not trained on 'drug_1uM.*' and has no gene drug_1uM, so it cannot tell it from others; name"
    with pytest.raises(ConfigError, match=f"{message} drug_1uM without other genes, on which"):
        screen.perturb([f"drug_1uM+{gene}"])


def test_columns_and_names_without_values_are_refused(screen: Screen) -> None:
    model = cellmill.load(screen.folder)
    for empty in (np.nan, None, ""):
        message = r"expected controls named 'control' in obs column 'guide', got no value; name the"
        with pytest.raises(DataError, match=message):
            model.perturb(_copy(screen, guide=empty))
    with pytest.raises(ConfigError, match=r"^perturbations: expected names, got none$"):
        screen.perturb([])
    with pytest.raises(ConfigError, match=r"^perturbations: expected names, got 1$"):
        screen.perturb([1])
    for option, value, text in (("control", "", "''"), ("control", 5, "5"), ("by", ["a"], "['a']")):
        message = f"^{re.escape(f'--{option}: expected a name, got {text}')}$"
        with pytest.raises(ConfigError, match=message):
            screen.perturb(**{option: value})
