"""Imputed expression equals what task imputation scores, in blocks and in a file; what cannot be
imputed is refused in a line.
"""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import cellmill
from cellmill import open_cells
from cellmill.cli import main
from cellmill.config.parts.tasks import ImputationConfig
from cellmill.data.inputs.h5 import write_cells
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.hidden_genes.fit_ridge import fit_ridge
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.inference import impute
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.imputation.task import Imputation
from cellmill.files import write_json
from tests.models import train_options
from tests.unit.evaluated import make_context, with_config
from tests.unit.exported import export_model

CONTINUOUS = {"tokenizer": "continuous"}
PROFILE: dict[str, Any] = {"family": "profile", "hidden": 16, "layers": 1, "heads": None}
MODELS: dict[str, dict[str, Any]] = {
    "decoder + ridge": PROFILE | {"objective": "cell_decoding"},
    "decoder of queries": PROFILE | {"objective": "query_decoding", "decoder_hidden": 8},
    "masked values": {"objective": "masked_value", "layers": 0},
}


@pytest.fixture(scope="module", params=MODELS)
def context(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    corpus: dict[str, Path],
) -> Context:
    """The model is in the folder of its config's entry `folder`; the first has a ridge regression."""
    folder = tmp_path_factory.mktemp("imputed")
    context = make_context(folder, corpus, tokens=CONTINUOUS, **MODELS[request.param])
    model = context.model
    model.config["folder"] = str(folder / "model")
    if request.param == "decoder + ridge":
        ridge = fit_ridge(model)
        assert ridge is not None
        ridge = replace(ridge, decoder_weight=np.array([0.3], np.float32))
        with_config(folder / "model", ridge=ridge.write(folder / "model"))
        model = replace(model, ridge=ridge)
    return replace(context, model=model)


def _folder(context: Context) -> Path:
    return Path(context.model.config["folder"])


def _cells_without(genes: np.ndarray, cells: Path) -> ad.AnnData:
    """Raw cells of a file that lacks these genes."""
    adata = open_cells(cells)
    return adata[:, ~np.isin(np.arange(adata.n_vars), genes)].copy()


def _genes(context: Context) -> tuple[np.ndarray, list[str]]:
    """Some genes, as rows of the vocabulary and as columns of the cells, and their ids."""
    rows = context.measured_genes[5:150:2]
    ids = [context.model.vocabulary.gene_ids[row] for row in rows]
    columns = [context.reader.var_names.index(name) for name in ids]
    return np.array(columns), ids


def test_imputed_values_are_those_that_the_task_scores(
    context: Context, corpus: dict[str, Path]
) -> None:
    columns, ids = _genes(context)
    imputed = cellmill.load(_folder(context)).impute(_cells_without(columns, corpus["cells"]), ids)
    n_cells = context.reader.n_obs
    rows = context.model.vocabulary.rows_of(ids).astype(np.int64)
    every_cell = np.arange(n_cells)
    counts = read_rows(context.reader, every_cell)
    hidden = PartlyHiddenCells.from_context(context, every_cell, counts, rows)
    fold = Fold(0, np.arange(0, n_cells, 2), np.arange(1, n_cells, 2))
    task = Imputation(ImputationConfig(name="imputation", seeds=1))
    scored = {
        prediction.method.name: prediction
        for prediction in task.predict_folds(context.model, hidden, None, [fold])
    }
    method = "decoder" if context.model.ridge is None else "decoder + ridge"
    expected = scored[f"embedding + {method}"].values
    # the same cells, genes and blocks: the same bits
    np.testing.assert_array_equal(imputed.X[fold.tested], expected)
    assert expected.std(0).min() > 0
    assert imputed.var_names.tolist() == ids
    assert imputed.obs_names.tolist() == context.reader.obs_names.tolist()
    about = imputed.uns["cellmill_imputation"]
    assert about["method"] == method
    assert {*about["measured_genes"]} == {*context.model.vocabulary.gene_ids} - {*ids}
    assert about["named_and_measured"] == []


def test_blocks_have_the_values_of_the_whole(
    context: Context, corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, ids = _genes(context)
    cells = _cells_without(columns, corpus["cells"])
    counts = cells.X.toarray()
    counts[7] = 0
    cells.X = sp.csr_matrix(counts)
    model = cellmill.load(_folder(context))
    with pytest.warns(UserWarning, match="^adata: 1 cells have no gene that the model knows"):
        whole = model.impute(cells, ids[:9])
    monkeypatch.setattr(impute, "ROW_BLOCK", 90)
    with pytest.warns(UserWarning, match="their rows are NaN$"):
        in_blocks = model.impute(cells, ids[:9])
    assert np.isnan(whole.X).any(1).nonzero()[0].tolist() == [7]
    # other cells of a pass change the rounding of a vector by 5e-6
    np.testing.assert_allclose(in_blocks.X, whole.X, atol=5e-5)


def test_a_token_budget_bounds_each_pass(
    context: Context, corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, ids = _genes(context)
    cells = _cells_without(columns, corpus["cells"])
    model = cellmill.load(_folder(context))
    embed = model._model.embed
    n_tokens: list[int] = []

    def record(batch: Any) -> Any:
        n_tokens.append(len(batch.token_ids))
        return embed(batch)

    monkeypatch.setattr(model._model, "embed", record)
    whole = model.impute(cells, ids[:9])
    largest = max(n_tokens)
    n_tokens.clear()
    in_passes = model.impute(cells, ids[:9], token_budget=largest // 2)
    assert 0 < max(n_tokens) <= largest // 2
    np.testing.assert_allclose(in_passes.X, whole.X, atol=5e-5)


def test_a_file_of_few_genes_says_so_of_its_values(
    context: Context, corpus: dict[str, Path]
) -> None:
    _, ids = _genes(context)
    cells = _cells_without(np.arange(20, 10_000), corpus["cells"])
    model = cellmill.load(_folder(context))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.impute(cells, ids[:9], min_expressed_frac=0.0)
    (line,) = [str(each.message) for each in caught if "it measures" in str(each.message)]
    assert line.startswith("adata: it measures 20 of the model's ")
    assert line.endswith(": predicted values are less certain")


def test_the_command_writes_what_python_gives(
    context: Context,
    corpus: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(impute, "ROW_BLOCK", 90)
    columns, ids = _genes(context)
    cells = _cells_without(columns, corpus["cells"])
    given = tmp_path / "few.h5ad"
    cells.write_h5ad(given)
    out = tmp_path / "out.h5ad"
    words = ["impute", "--model", str(_folder(context)), "--input", str(given), "--out", str(out)]
    model = cellmill.load(_folder(context))
    symbol = model.vocabulary.symbols[model.vocabulary.gene_ids.index(ids[2])]
    measured = str(cells.var_names[0])
    for flags, named in (([], None), (["--genes", ids[4], symbol, measured], [ids[2], ids[4]])):
        assert main([*words, *flags]) == 0
        written = ad.read_h5ad(out)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = model.impute(cells, named)
        np.testing.assert_array_equal(written.X, expected.X)
        pd.testing.assert_frame_equal(written.var, expected.var)
        pd.testing.assert_frame_equal(written.obs, expected.obs)
        about = written.uns["cellmill_imputation"]
        assert about["model_digest"] == model.config["weights_sha256"]
        assert (
            list(about["measured_genes"]) == expected.uns["cellmill_imputation"]["measured_genes"]
        )
        printed = capsys.readouterr().out
        by = "decoder (weight 0.3) + ridge" if context.model.ridge else "decoder"
        heading = "few: on validation cells of the model, with a fifth of the genes hidden, the correlation"
        assert (heading in printed) == (context.model.ridge is not None)
        if context.model.ridge is not None:
            correlation = context.model.ridge.validation_correlation
            assert about["validation_correlation"] == correlation
            assert f"hidden gene over cells was {correlation:.2f} on average\n" in printed
        n_genes = len(named or ids)
        assert (
            f"few: {n_genes} genes of 600 cells predicted by {by} from {cells.n_vars} measured genes -> {out}\n"
            in printed
        )
    assert list(about["named_and_measured"]) == [measured]
    assert (
        f"few: 1 of the named genes are measured in it and not predicted: {measured}\n" in printed
    )
    assert {*written.var_names} == {ids[2], ids[4]}
    before = given.read_bytes()
    assert main([*words[:-1], str(given)]) == 2
    assert main([*words[:-1], str(tmp_path / "out.csv")]) == 2
    assert "expected a name that ends in .h5ad" in capsys.readouterr().err
    assert given.read_bytes() == before
    # what is known after the last block only leaves the file as it was
    earlier = out.read_bytes()
    assert main([*words, "--min-expressed-frac", "0.99"]) == 2
    assert "embed.min_expressed_frac is 0.99; " in capsys.readouterr().err
    assert out.read_bytes() == earlier


def test_what_cannot_be_imputed_is_refused_in_a_line(
    context: Context, corpus: dict[str, Path], tmp_path: Path
) -> None:
    columns, ids = _genes(context)
    model = cellmill.load(_folder(context))
    cells = _cells_without(columns, corpus["cells"])
    symbol = model.vocabulary.symbols[0]
    with pytest.raises(
        ConfigError,
        match=rf"^genes: '{symbol}x' is not a gene of the model; did you mean '{symbol}'",
    ):
        model.impute(cells, [ids[0], f"{symbol}x"])
    with pytest.raises(DataError, match=r"it measures all 2 named genes; name some that it lacks$"):
        model.impute(cells, [*cells.var_names[:2]])
    with pytest.raises(
        DataError, match=r"measures all of the model's genes: none is left to predict$"
    ):
        model.impute(open_cells(corpus["cells"]))
    with pytest.raises(
        ConfigError, match=r"^impute: unknown argument 'gene'; did you mean 'genes'"
    ):
        model.impute(cells, gene=ids)
    for given, text in (([], "none"), ([3], "3")):
        with pytest.raises(ConfigError, match=rf"^genes: expected names, got {text}$"):
            model.impute(cells, given)
    assert model.impute(cells, ids[0]).var_names.tolist() == ids[:1]
    silent = export_model(tmp_path / "silent", corpus["vocabulary"], objective="masked_gene")
    with pytest.raises(ConfigError, match=r"silent: it predicts no expression; export a run with"):
        cellmill.load(silent).impute(cells, ids)


def test_a_file_of_ranks_is_refused(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PROFILE | {"family": "encoder", "heads": 2, "objective": "cell_decoding"}
    folder = export_model(
        tmp_path / "model", corpus["vocabulary"], tokens={"tokenizer": "rank"}, **options
    )
    ids = cellmill.load(folder).vocabulary.gene_ids[:50]
    ranks = sp.csr_matrix(np.ones((3, 50), np.uint16))
    frames = [pd.DataFrame(index=[*names]) for names in ("abc", ids)]
    path = tmp_path / "ranks.h5ad"
    write_cells(path, *frames, [ranks], ranks.nnz, ranks.dtype, ordered=True, ranked=True)
    words = ["impute", "--model", str(folder), "--input", str(path)]
    assert main([*words, "--out", str(tmp_path / "out.h5ad")]) == 2
    assert (
        "ordered and have no counts; impute predicts expression from counts"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out.h5ad").exists()


def test_training_cells_are_marked(
    context: Context, corpus: dict[str, Path], tmp_path: Path
) -> None:
    columns, ids = _genes(context)
    cells = _cells_without(columns, corpus["cells"])
    folder = tmp_path / "run" / "model"
    shutil.copytree(_folder(context), folder)
    options = train_options(
        tokens=CONTINUOUS, model={"family": "profile"}, objective={"name": "cell_decoding"}
    )
    manifest = context.model.manifest
    fingerprint = manifest.fingerprint_with(options.read_columns(), options.number_columns())
    with_config(folder, fingerprint=fingerprint)
    record = {"options": options.model_dump(mode="json"), "manifest": str(manifest.path)}
    write_json(tmp_path / "run" / "train" / "run.json", record)
    n_read = manifest.splits["train"].n_obs + manifest.splits["val"].n_obs
    with pytest.warns(
        UserWarning, match=f"^adata: {n_read} cells come from the model's training or"
    ):
        imputed = cellmill.load(folder).impute(cells, ids[:2])
    assert imputed.obs["cellmill_seen_in_training"].sum() == n_read
    assert imputed.uns["cellmill_imputation"]["n_seen_in_training"] == n_read

    with pytest.warns(UserWarning, match="training cells"):
        imputed = cellmill.load(_folder(context)).impute(cells, ids[:2])
    about = imputed.uns["cellmill_imputation"]
    assert "cellmill_seen_in_training" not in imputed.obs
    assert "training" in about["training_cells_unknown"]
