"""Labels and numbers from vectors: losses, weights, cells without one, rows of the head, and
calibration.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from cellmill.config.checks import check_together
from cellmill.config.load import check_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import FamilyConfig
from cellmill.config.parts.objective import ObjectiveConfig
from cellmill.config.parts.tokens import ContinuousTokens, Tokens
from cellmill.config.run import Predict
from cellmill.data.shards.obs import parse_numbers
from cellmill.errors import ConfigError
from cellmill.evaluate.hidden_genes.decoder import find_decoding_objective
from cellmill.evaluate.inference.calibration import (
    N_THRESHOLDS,
    calibrate,
    find_classifications,
    fit_temperature,
    run_head,
)
from cellmill.evaluate.inference.predict import choose_thresholds
from cellmill.evaluate.tasks.perturbation.response import ResponseHead
from cellmill.files import write_json
from cellmill.models.batch import add_ends, has_genes, to_tensors
from cellmill.models.objective import pearson
from cellmill.models.objectives.regression import correlation_loss_sum
from cellmill.stages import cells as predict
from cellmill.stages.training_inputs import check_levels, fit_options
from tests.checks import refused
from tests.models import KEYS, initialized, prepare, random_cells, spec, train_options
from tests.unit.exported import export_model
from tests.unit.small_corpus import (
    genes_named,
    random_counts,
    vocabulary_of,
    write_corpus,
    write_dataset,
)

GENES = 12
LEVELS = {"batch": ("1", "2"), "kind": ("b", "m", "t", "<missing>")}
LABELS = [1, 3, 0, 2, 4, 3]  # numbers of levels: 0 is unknown, 4 missing
TOKENS = ContinuousTokens.model_validate({"tokenizer": "continuous", "max_tokens": 8})
CLASSIFY: dict[str, Any] = {"objective": "classification", "label_column": "kind"}


def _model(**options: Any) -> Any:
    return initialized(
        spec(
            GENES,
            TOKENS,
            LEVELS,
            **{"family": "profile", "hidden": 8, "layers": 1} | CLASSIFY | options,
        )
    )


def _batch() -> Any:
    levels = np.array([[1, label] for label in LABELS], np.int32)
    return to_tensors(random_cells([4] * len(LABELS), TOKENS, GENES, levels=levels))


def test_the_loss_is_the_weighted_cross_entropy() -> None:
    model = _model(class_weights={"m": 0.5, "t": 2.0})
    batch = _batch()
    labelled = [0, 1, 3, 5]
    expected = torch.tensor([LABELS[i] - 1 for i in labelled])
    vectors = model.embed(batch)[labelled]
    logits = F.linear(vectors, model.label_head.out.weight, model.label_head.out.bias)[:, :3]
    for training, weights in ((True, [1, 2, 0.5, 2]), (False, [1, 1, 1, 1])):
        prepared = prepare(model.train(training), batch)
        assert prepared.n_targets == 4
        loss = F.cross_entropy(logits, expected, reduction="none") @ torch.tensor(
            weights, dtype=torch.float32
        )
        torch.testing.assert_close(model(prepared), loss)
    labels, observed = model.objective.observe(model, prepared)
    torch.testing.assert_close(
        torch.from_numpy(run_head(model, vectors.detach().numpy(), model.objective.predict)),
        observed,
    )
    figures, verdicts = model.objective.judge(
        labels.numpy(), observed.detach().numpy(), statistics=None
    )
    assert figures["cross_entropy"] == pytest.approx(
        F.cross_entropy(logits, expected).item(), rel=1e-5
    )
    assert figures["cross_entropy_frequencies"] == pytest.approx(
        -(0.5 * np.log(0.5) + 0.5 * np.log(0.25))
    )
    assert verdicts[0].against == "the frequencies of labels"
    only_one = model.objective.judge(np.zeros(2, int), np.zeros((2, 2)), statistics=None)[0]
    assert str(only_one["cross_entropy_frequencies"]) == "0.0"


def _expected_error(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """Calibration error after Guo et al. 2017, equation 3, cell by cell."""
    members: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(logits / temperature, labels):
        probabilities = np.exp(row) / np.exp(row).sum()
        highest = float(probabilities.max())
        members.setdefault(min(int(highest * 15), 14), []).append(
            (highest, probabilities.argmax() == label)
        )
    gaps = [
        len(own) * abs(np.mean([r for _, r in own]) - np.mean([p for p, _ in own]))
        for own in members.values()
    ]
    return float(sum(gaps) / len(labels))


def test_calibration_is_measured_with_the_temperature() -> None:
    rng = np.random.default_rng(0)
    objective = _model().objective
    logits = rng.normal(0, 3, (40, 3)).astype(np.float32)
    labels = rng.integers(0, 3, 40)
    figures, _ = objective.judge(labels, logits, statistics=None)
    assert "calibration_error" not in figures
    objective.calibrated_temperature = 2.5
    figures, _ = objective.judge(labels, logits, statistics=None)
    assert figures["calibration_error"] == pytest.approx(_expected_error(logits, labels, 2.5))
    assert figures["calibration_error_uncalibrated"] == pytest.approx(
        _expected_error(logits, labels, 1.0)
    )
    assert figures["calibration_error"] != pytest.approx(
        figures["calibration_error_uncalibrated"], rel=0.05
    )
    assert figures["temperature"] == 2.5


def test_a_batch_without_labels_has_zero_gradients() -> None:
    model = _model()
    batch = _batch()
    batch.levels[:, 1] = 0
    loss = model(prepare(model, batch))
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_hidden_label_reverses_only_the_vector_gradient() -> None:
    gradients = []
    for scale in (None, 0.25):
        model = _model(adversarial_scale=scale)
        prepared = model.prepare(_batch(), seed=0, step=0)
        model.objective.loss(model, model.states(prepared), prepared).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        factor = 1 if name.startswith("label_head") else -0.25
        torch.testing.assert_close(gradients[1][name], factor * expected, msg=name)
    figures, verdicts = model.objective.judge(np.array([0, 2]), np.eye(3)[:2], statistics=None)
    assert (figures["accuracy"], verdicts) == (0.5, []), "a leak is not better than a baseline"
    assert (
        len(find_classifications(_model().objective)),
        find_classifications(model.objective),
    ) == (
        1,
        {},
    )
    assert (_model().objective.config.supervised_by, model.objective.config.supervised_by) == (
        ("kind",),
        (),
    )


def test_a_model_that_only_hides_a_label_is_refused() -> None:
    objective = {"name": "classification", "label_column": "kind", "adversarial_scale": 0.1}
    with pytest.raises(
        ConfigError,
        match=r"^objective\.adversarial_scale: expected a sum with a part that does not",
    ):
        check_together(train_options(objective=objective))
    parts = {"batch": objective}
    with pytest.raises(
        ConfigError, match=r"^objective\.parts\.batch\.adversarial_scale: expected a"
    ):
        check_together(train_options(objective={"name": "sum", "parts": parts}))


def _stream(objective: dict[str, Any], **stream: Any) -> dict[str, Any]:
    """Section stream of a run, as train gets it, twice."""
    parsed = train_options(objective=objective, stream=stream)
    stored = parsed.model_dump(mode="json")
    assert TrainOptions.model_validate(stored) == parsed
    return dict(stored["stream"])


def test_a_classification_reads_labelled_cells_evenly() -> None:
    label: dict[str, Any] = {"label_column": "kind"}
    alone = {"name": "classification"} | label
    plain = _stream({"name": "cell_decoding"})
    assert plain["weight_by"] is None
    assert "labelled_frac" not in plain, "a run without it has the identity of earlier versions"
    drawn = plain | {"weight_by": "kind", "labelled_frac": 1.0}
    assert _stream(alone) == drawn
    assert _stream({"name": "sum", "parts": {"kind": alone}}) == drawn
    assert _stream(alone | {"class_weights": "balanced"}) == drawn | {"weight_exponent": 0.0}
    assert _stream(alone, labelled_frac=0.8, max_repeats=3) == drawn | {
        "labelled_frac": 0.8,
        "max_repeats": 3.0,
    }
    assert _stream(alone, weight_by=None) == plain
    assert _stream(alone, weight_by="donor") == plain | {"weight_by": "donor"}
    assert (
        _stream({"name": "sum", "parts": {"classification": label, "cell_decoding": {}}}) == plain
    )
    assert _stream({"name": "supervised_contrastive"} | label) == plain


def test_balanced_weights_average_one(tmp_path: Path) -> None:
    donors = np.where(np.arange(90) % 5 == 0, np.nan, np.arange(90) % 3 % 2)
    manifest = write_corpus(
        tmp_path, 90, obs={"donor": donors}, val_frac=0.2, test_frac=0.2, cells_per_shard=64
    )
    shards = [manifest.shard_path(shard) for shard in manifest.splits["train"].shards]
    column = np.concatenate([ad.read_h5ad(path).obs["donor"].astype(float) for path in shards])
    names, sizes = np.unique(column[~np.isnan(column)], return_counts=True)
    expected = {str(int(name)): sizes.sum() / (len(sizes) * n) for name, n in zip(names, sizes)}
    given = {"name": "classification", "label_column": "donor", "class_weights": "balanced"}
    for objective in (given, {"name": "sum", "parts": {"classification": given | {"weight": 2.0}}}):
        options = fit_options(
            train_options(model={"family": "profile"}, objective=objective), tmp_path, manifest
        )
        (part,) = options.objective.all_parts()
        assert part.class_weights == pytest.approx(expected)


def test_equal_numbers_and_numbers_beyond_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ages = np.arange(90) % 7 + 0.5
    with_sentinels = np.where(np.arange(90) % 3 == 0, np.finfo(np.float64).max, ages)
    obs: dict[str, object] = {"equal": np.full(90, 0.1), "age": with_sentinels}
    obs["one"] = np.ones(90)
    manifest = write_corpus(tmp_path, 90, obs=obs)

    def fit(column: str, train: Path | None = None) -> Any:
        objective = {"name": "regression", "target_column": column}
        options = train_options(model={"family": "profile"}, objective=objective)
        return fit_options(options, tmp_path, manifest, train=train).objective

    # the standard deviation of these equal numbers is not 0, but 1.4e-17
    with refused(
        "objective.target_column equal: expected numbers that differ, got 90 training cells with the "
        "same number; choose another column"
    ):
        fit("equal", tmp_path / "train")
    # a training that was begun by a version that had accepted the column can be finished
    write_json(tmp_path / "train" / "checkpoints" / "step-00000001" / "manifest.json", {})
    assert 0 < fit("equal", tmp_path / "train").target_std < 1e-16
    assert "number; choose another column, in a new training" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="target_column one: expected numbers that differ"):
        fit("one", tmp_path / "train")
    fitted = fit("age")
    known = ages[np.arange(90) % 3 > 0]
    assert fitted.target_mean == pytest.approx(known.mean())
    assert fitted.target_std == pytest.approx(known.std())
    objective = fitted.load()(fitted, TOKENS)
    numbers = torch.tensor([[known[0]], [torch.finfo(torch.float64).max], [-1e39], [torch.nan]])
    batch = replace(to_tensors(random_cells([4] * 4, TOKENS, GENES)), numbers=numbers)
    assert objective.find_targets(batch)[1].tolist() == [True, False, False, False]


def test_columns_without_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = {"name": "classification", "label_column": "kind"}
    options = train_options(model={"family": "profile"}, objective=objective)
    check_levels(options, {"kind": ("a", "b", "<missing>")}, 100)
    with pytest.raises(
        ConfigError, match=r"objective\.label_column kind: all labelled cells of the corpus have"
    ):
        check_levels(options, {"kind": ("a", "<missing>")}, 100)
    levels = tuple(map(str, range(51)))
    check_levels(options, {"kind": levels[:50]}, 100)
    with pytest.raises(
        ConfigError, match=r"label_column kind: 51 values for 100 training cells, so most cells"
    ):
        check_levels(options, {"kind": levels}, 100)
    by_batch = {"name": "cell_decoding", "batch_column": "dataset"}
    options = train_options(model={"family": "profile"}, objective=by_batch)
    check_levels(options, {"dataset": ("one", "two")}, 100)
    for one_level in (("one",), ("one", "<missing>")):
        with pytest.raises(
            ConfigError, match=r"batch_column dataset: all cells .* the same value; choose another"
        ):
            check_levels(options, {"dataset": one_level}, 100, tmp_path)
    write_json(
        tmp_path / "status.json", {}
    )  # it was finished by a version that had accepted the column
    capsys.readouterr()
    check_levels(options, {"dataset": ("one", "<missing>")}, 100, tmp_path)
    assert capsys.readouterr().out == (
        "warning: objective.batch_column dataset: all cells of the corpus with a value have the same value; choose "
        "another column, or do without, in a new training; this one can be finished\n"
    )
    with pytest.raises(ConfigError, match=r"batch_column dataset: all cells .* the same value"):
        check_levels(options, {"dataset": ("one",)}, 100, tmp_path)
    weights = {"class_weights": {"B cell": 2.0, "T cels": 3.0}}
    summed = {"name": "sum", "parts": {"types": objective | weights}}
    for option, weighted in (
        ("objective", objective | weights),
        ("objective.parts.types", summed),
    ):
        given = train_options(model={"family": "profile"}, objective=weighted)
        with refused(
            f"{option}.class_weights: no cell of the corpus has kind 'T cels'; did you mean 'T cell'?"
        ):
            check_levels(given, {"kind": ("B cell", "T cell", "<missing>")}, 100)
        with refused(
            f"{option}.label_column kind: all labelled cells of the corpus have the same value; choose another "
            "column, or do without"
        ):
            check_levels(given, {"kind": ("a", "<missing>")}, 100)


@pytest.mark.parametrize("weight", ["inf", "nan", "-1.0"])
def test_weights_of_labels_are_finite_and_not_negative(weight: str) -> None:
    given = {
        "name": "classification",
        "label_column": "kind",
        "class_weights": {"B": float(weight)},
    }
    with refused(f"x: class_weights: B: expected a finite weight of 0 or more, got {weight}"):
        check_options(ObjectiveConfig, given, "x")


def test_columns_of_a_sum_name_the_options_of_its_parts() -> None:
    parts = {
        "type": {"name": "classification", "label_column": "kind"},
        "age": {"name": "regression", "target_column": "age"},
        "response": {"name": "perturbation_response", "control": "c", "batch_column": "lane"},
    }
    summed = check_options(ObjectiveConfig, {"name": "sum", "parts": parts}, "objective")
    columns = summed.columns()
    assert columns.levels == {
        "kind": "objective.parts.type.label_column",
        "lane": "objective.parts.response.batch_column",
        "perturbation": "objective.parts.response.perturbation_column",
    }
    assert columns.numbers == {"age": "objective.parts.age.target_column"}
    assert [option for option, _, _ in columns.named] == [
        "objective.parts.type.class_weights",
        "objective.parts.response.control",
    ]


def test_a_cell_without_genes_takes_no_part() -> None:
    model = _model(family="encoder", heads=2, pooling="cls")
    batch = _batch()
    lengths = torch.tensor([4, 0, 4, 4, 4, 8], dtype=torch.int32)
    batch = replace(
        batch,
        cu_seqlens=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        lengths=lengths.tolist(),
    )
    view = model.view(batch, **KEYS)
    assert min(view.lengths) > 0
    assert model.prepare(view, **KEYS).target_cells.tolist() == [0, 3, 5]
    assert has_genes(add_ends(batch, 2)).tolist() == [True, False, True, True, True, True]


def test_calibration_finds_the_temperature_of_simulated_logits() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(0, 2, (20_000, 4))
    draws = np.exp(true - np.log(np.exp(true).sum(1, keepdims=True))).cumsum(1)
    labels = np.minimum((draws < rng.random((20_000, 1))).sum(1), 3)
    found = calibrate((true * 2.5).astype(np.float32), labels)
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.calibration_error < 0.015 < 0.1 < found.calibration_error_uncalibrated
    assert found.accuracy_above[0] == found.accuracy
    assert found.labelled_above[0] == 1
    assert len(found.accuracy_above) == N_THRESHOLDS
    assert found.accuracy_above[90] > 0.9 > found.accuracy  # type: ignore[operator]


def test_a_temperature_that_raises_the_error_is_dropped() -> None:
    rng = np.random.default_rng(0)
    logits = np.log(np.tile([0.8, 0.2], (500, 1)))
    # calibrated, but for a few wrong labels that it is sure of
    labels = (rng.random(500) > 0.8).astype(np.int64)
    logits[::100], labels[::100] = [40.0, 0.0], 1
    assert fit_temperature(logits, labels) > 1.5
    found = calibrate(logits, labels)
    assert found.temperature == 1
    assert found.calibration_error == found.calibration_error_uncalibrated


EARLIER_BLOCK = FamilyConfig.model_validate({"family": "scgpt", "embed_layer": -1})


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "classification", "label_column": "a"},
        {"name": "regression", "target_column": "a"},
        {"name": "supervised_contrastive", "label_column": "a"},
        {"name": "distill", "teacher": "a"},
        {"name": "cell_decoding"},
        {"name": "perturbation_response", "control": "a"},
    ],
    ids=lambda objective: objective["name"],
)
def test_heads_outside_the_block_of_the_vector_are_refused(objective: dict[str, str]) -> None:
    name = objective["name"]
    message = (
        f"model.embed_layer: expected 0 with objective {name}, which is trained on vectors of the last block, got -1; "
        "set it to 0"
    )
    config = ObjectiveConfig.model_validate(objective)
    with refused(message, ValueError):
        EARLIER_BLOCK.check_with(config, TOKENS)
    parts = {"masked_value": {}, name: objective}
    with refused(message, ValueError):
        EARLIER_BLOCK.check_with(
            ObjectiveConfig.model_validate({"name": "sum", "parts": parts}), TOKENS
        )


@pytest.mark.parametrize(
    ("objective", "find"),
    [
        ("regression", lambda model: choose_thresholds(model, {}, Predict(), "a")),
        ("cell_decoding", find_decoding_objective),
        ("perturbation_response", lambda model: ResponseHead.find(model, "32-true")),
    ],
    ids=["predict", "impute", "perturb"],
)
def test_heads_that_were_trained_so_predict_nothing(objective: str, find: Any) -> None:
    given: dict[str, Any] = {
        "regression": {"target_column": "a", "target_mean": 0.0, "target_std": 1.0},
        "perturbation_response": {"perturbation_column": "a", "control": "x"},
    }
    family = {"family": "scgpt", "hidden": 8, "heads": 1, "layers": 2}
    options = family | {"objective": objective} | given.get(objective, {})
    tokens = Tokens.model_validate({"tokenizer": "binned"})
    levels = {"a": ("x", "y")}
    find(initialized(spec(GENES, tokens, levels, **options)))
    with refused(
        "model.embed_layer: expected 0 in a model that predicts from vectors, because it was trained on those of the "
        "last block, got -1; set it to 0 in the model's config.json, or train it again"
    ):
        find(initialized(spec(GENES, tokens, levels, **options, embed_layer=-1)))


@pytest.mark.parametrize("option", ["min_probability", "min_accuracy"])
def test_numbers_have_no_threshold(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    regression = {"target_column": "a", "target_mean": 0.0, "target_std": 1.0}
    family = {"family": "profile", "hidden": 8, "layers": 1}
    options = family | {"objective": "regression"} | regression
    model = initialized(spec(GENES, TOKENS, {}, **options))
    assert choose_thresholds(model, {}, Predict(), "a") == {}
    assert capsys.readouterr().err == ""
    assert choose_thresholds(model, {}, Predict(**{option: 0.9}), "a") == {}
    assert capsys.readouterr().err == (
        f"a: predict.{option} has no effect: the model predicts numbers only, which have no threshold\n"
    )


@pytest.mark.parametrize("name", ["masked_gene", "masked_value"])
def test_masked_tokens_suit_any_block_of_the_vector(name: str) -> None:
    EARLIER_BLOCK.check_with(ObjectiveConfig.model_validate({"name": name}), TOKENS)


def test_a_model_without_labels_cannot_predict(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a.h5ad", random_counts(5, GENES), genes_named(GENES))
    genes = tmp_path / "vocabulary.tsv"
    vocabulary_of(genes_named(GENES)).write(genes)
    model = export_model(tmp_path / "model", genes)
    options = check_options(predict.PredictOptions, {"embed": {}, "predict": {}}, "test")
    with pytest.raises(
        ConfigError,
        match="it predicts neither labels nor numbers; export a run with objective classification",
    ):
        predict.predict(
            options=options, model=model, input=path, counts="X", out=tmp_path / "out.h5ad"
        )


def test_the_pearson_loss_is_one_minus_the_correlation() -> None:
    table = torch.zeros(12, 3)
    table[:9] = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 3)))
    table[:9, 0] = 1
    table[:9, 2] += 0.5 * table[:9, 1]
    x = table[:9, 1].numpy()
    y = table[:9, 2].numpy()
    assert correlation_loss_sum(table).item() == pytest.approx(
        9 * (1 - np.corrcoef(x, y)[0, 1]), abs=1e-6
    )
    moved = table * torch.tensor([1.0, 3.0, 1.0]) + table[:, :1] * torch.tensor([0.0, 7.0, 0.0])
    assert correlation_loss_sum(moved).item() == pytest.approx(
        correlation_loss_sum(table).item(), abs=1e-6
    )


@pytest.mark.parametrize("loss", ["mse", "pearson"])
def test_the_judge_reports_errors_in_the_unit_of_the_column(loss: str) -> None:
    given = {
        "name": "regression",
        "target_column": "age",
        "loss": loss,
        "target_mean": 40.0,
        "target_std": 12.0,
    }
    config = ObjectiveConfig.model_validate(given)
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 6, 50).astype(np.float32)  # many ties
    predicted = (numbers + rng.normal(0, 2, 50)).round(1).astype(np.float32)
    objective = config.load()(config, Tokens.model_validate({}))
    figures, _ = objective.judge(numbers, predicted, statistics=None)
    assert figures["spearman"] == pytest.approx(scipy.stats.spearmanr(numbers, predicted).statistic)
    assert figures["pearson"] == pytest.approx(scipy.stats.pearsonr(numbers, predicted).statistic)
    own = {name: figures.get(name) for name in ("root_mean_squared_error", "mean_absolute_error")}
    if loss == "pearson":  # predictions have no unit
        assert own == {"root_mean_squared_error": None, "mean_absolute_error": None}
        return
    ages, of_model = (40 + 12 * values.astype(np.float64) for values in (numbers, predicted))
    assert own["root_mean_squared_error"] == pytest.approx(((ages - of_model) ** 2).mean() ** 0.5)
    assert own["mean_absolute_error"] == pytest.approx(np.abs(ages - of_model).mean())


@pytest.mark.parametrize("loss", ["mse", "huber", "pearson"])
def test_equal_predictions_have_errors_and_no_correlation(loss: str) -> None:
    given = {"name": "regression", "target_column": "age", "loss": loss}
    config = ObjectiveConfig.model_validate(given | {"target_mean": 40.0, "target_std": 12.0})
    objective = config.load()(config, Tokens.model_validate({}))
    numbers = np.array([-1, 0, 1, 2], np.float32)
    equal = np.ones(4, np.float32)
    for targets in (equal, equal[:0]):
        judged = objective.judge_observed(targets, targets, statistics=None)
        assert judged == ({"n_targets": len(targets)}, [])
    figures, verdicts = objective.judge(numbers, equal, statistics=None)
    if loss == "pearson":  # predictions have no unit
        assert (figures, verdicts) == ({"n_targets": 4}, [])
        return
    assert figures == {
        "n_targets": 4,
        "r2": pytest.approx(-0.2),
        "mean_absolute_error": pytest.approx(12),
        "root_mean_squared_error": pytest.approx(12 * 1.5**0.5),
    }
    assert [verdict.outcome for verdict in verdicts] == ["behind"]


@pytest.mark.parametrize("constant", [0.1, 0.0, 7e8])
def test_rounding_errors_of_constants_have_no_correlation(constant: float) -> None:
    equal = np.full(3, constant)
    different = np.array([1.0, 2.0, 4.0])
    assert pearson(equal, equal) is None
    assert pearson(equal, different) is None
    assert pearson(different, equal) is None
    random = np.random.default_rng(0).normal(size=(2, 9))
    assert pearson(*random) == pytest.approx(np.corrcoef(*random)[0, 1])


@pytest.mark.parametrize("n", [0, 1, 5])
def test_cells_that_do_not_differ_have_a_finite_gradient(n: int) -> None:
    table = torch.zeros(6, 3)
    table[:n] = torch.tensor([1.0, 0.3, 0.2])
    table[: n // 2, 2] = 0.8
    loss = correlation_loss_sum(table.requires_grad_())
    loss.backward()
    assert loss.item() == pytest.approx(n)
    assert table.grad is not None
    assert table.grad.isfinite().all()


def test_ambiguous_text_is_not_read_as_a_number() -> None:
    scores = pd.Categorical(["1.5", None, "-2e3", "nan"])
    np.testing.assert_array_equal(parse_numbers(scores), [1.5, np.nan, -2000, np.nan])
    assert parse_numbers(pd.Categorical(["1_2", "1_3", "2_1"])) is None
