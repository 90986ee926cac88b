"""Neighbours, votes, percentiles and terms of an atlas equal those of slow loops; a damaged atlas is
one line.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest

import cellmill
from cellmill.cli import main
from cellmill.config.load import find_atlas
from cellmill.config.run import Atlas, Map
from cellmill.data.genes.tables import cell_ontology
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.atlas.build import EmbeddedCells, make_atlas, read_embedded, write_atlas
from cellmill.evaluate.atlas.mapping import AtlasMapping, map_vectors
from cellmill.evaluate.atlas.ontology import credit_labels, find_terms
from cellmill.evaluate.atlas.search import NOWHERE, Points
from cellmill.evaluate.atlas.store import CellAtlas
from cellmill.evaluate.atlas.votes import NO_LABEL
from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.stages import atlas as stages_atlas
from tests.unit.evaluated import embed
from tests.unit.exported import export_model

DIGEST = "d" * 64
UNKNOWN = Seen(None, "")
WIDTH = 8


def draw_dataset(
    name: str, n: int, seed: int, donors: int = 5, labels: Any = "abc"
) -> EmbeddedCells:
    """Cells in a cluster for each label; every tenth has no label."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, len(labels), n)
    centers = 3 * np.random.default_rng(9).normal(size=(len(labels), WIDTH))
    vectors = (centers[kind] + rng.normal(size=(n, WIDTH))).astype(np.float32)
    texts = np.array([labels[index] for index in kind], object)
    texts[::10] = None
    names = np.array([f"donor {index}" for index in rng.integers(0, donors, n)], object)
    return EmbeddedCells(name, "kind", vectors, np.arange(n), texts, names)


def written_atlas(
    folder: Path, *datasets: EmbeddedCells, max_exact: int = 10**6, **section: Any
) -> CellAtlas:
    made = make_atlas(datasets, DIGEST, Atlas.model_validate(section))
    write_atlas(folder, made, max_exact)
    return CellAtlas.read(folder, DIGEST, WIDTH)


def map_to(atlas: CellAtlas, vectors: np.ndarray, **section: Any) -> AtlasMapping:
    return map_vectors(atlas, vectors, UNKNOWN, Map.model_validate(section))


def nearest_by_loops(
    points: np.ndarray, query: np.ndarray, k: int, allowed: list[int]
) -> tuple[list[int], list[float]]:
    distances = [(float(np.linalg.norm(points[point] - query)), point) for point in allowed]
    chosen = sorted(distances)[:k]
    return [point for _, point in chosen], [distance for distance, _ in chosen]


def vote_by_loops(
    atlas: CellAtlas, points: list[int], left_out: int | None = None
) -> dict[str, float]:
    """Share of the votes by label, in the order of the nearest cell with it."""
    by_donor: dict[int, Counter[str]] = defaultdict(Counter)
    order: dict[str, float] = {}
    for point in points:
        for cell in atlas.cells[atlas.cells["point"] == point]:
            if cell["label"] != NO_LABEL and cell["donor"] != left_out:
                label = atlas.record.labels[cell["label"]]
                by_donor[int(cell["donor"])][label] += 1
    for labels in by_donor.values():
        for label, n in labels.items():
            order[label] = order.get(label, 0) + n / sum(labels.values()) / len(by_donor)
    return order


def stored_vectors(atlas: CellAtlas) -> np.ndarray:
    return np.asarray(atlas.points.vectors, np.float64)


def test_neighbours_and_votes_equal_those_of_loops(tmp_path: Path) -> None:
    atlas = written_atlas(
        tmp_path, draw_dataset("one", 150, 1), draw_dataset("two", 100, 2, donors=3), neighbors=7
    )
    new = draw_dataset("new", 40, 3).vectors
    new[4] = np.nan
    mapped = map_to(atlas, new)
    points = stored_vectors(atlas)
    scale = atlas.record.scale
    for cell, vector in enumerate(new):
        if cell == 4:
            assert mapped.obs["cellmill_label"][cell] is np.nan
            assert (mapped.obsm["cellmill_neighbors"][cell] == NOWHERE).all()
            continue
        nearest, distances = nearest_by_loops(points, vector / scale, 7, list(range(len(points))))
        numbers = mapped.obsm["cellmill_neighbors"][cell]
        assert atlas.cells["point"][numbers].tolist() == nearest
        stored = mapped.obsm["cellmill_neighbor_distances"][cell]
        np.testing.assert_allclose(stored, np.array(distances) * scale, rtol=1e-5)
        votes = vote_by_loops(atlas, nearest)
        most = max(votes.values())
        label = mapped.obs["cellmill_label"][cell]
        assert mapped.obs["cellmill_agreement"][cell] == pytest.approx(most, abs=1e-6)
        if not mapped.obs["cellmill_refused"][cell]:
            assert votes[label] == pytest.approx(most)
        stored_cell = atlas.cells[numbers[0]]
        dataset = "one" if numbers[0] < 150 else "two"
        assert mapped.obs["cellmill_nearest"][cell] == f"{dataset}:{stored_cell['row']}"


def test_percentiles_are_of_cells_without_their_donor(tmp_path: Path) -> None:
    atlas = written_atlas(
        tmp_path, draw_dataset("one", 90, 1), draw_dataset("two", 60, 2, donors=2), neighbors=5
    )
    points = stored_vectors(atlas)
    donors_at = [
        {*atlas.cells["donor"][atlas.cells["point"] == point]} for point in range(len(points))
    ]
    distances = []
    right = []
    for cell in atlas.cells:
        others = [point for point, donors in enumerate(donors_at) if donors != {cell["donor"]}]
        nearest, away = nearest_by_loops(points, points[cell["point"]], 5, others)
        distances.append(np.mean(away))
        votes = vote_by_loops(atlas, nearest, cell["donor"])
        if cell["label"] != NO_LABEL and votes:
            right.append(max(votes, key=votes.get) == atlas.record.labels[cell["label"]])  # type: ignore[arg-type]
    np.testing.assert_allclose(atlas.reference["distance"], distances, rtol=1e-4)
    assert atlas.record.accuracy == pytest.approx(np.mean(right), abs=0.02)  # but for ties
    new = np.float32(1.2) * draw_dataset("new", 50, 3).vectors
    mapped = map_to(atlas, new, refuse_frac=0.1)
    for cell, vector in enumerate(new):
        _, away = nearest_by_loops(points, vector / atlas.record.scale, 5, list(range(len(points))))
        n_nearer = sum(distance < np.mean(away) for distance in atlas.reference["distance"])
        percentile = 100 * n_nearer / 151
        assert mapped.obs["cellmill_distance_percentile"][cell] == pytest.approx(
            percentile, abs=0.01
        )
        refused = mapped.obs["cellmill_refused"][cell]
        assert refused == (percentile >= 90)
        assert pd.isna(mapped.obs["cellmill_label"][cell]) == refused
    assert 0 < mapped.obs["cellmill_refused"].sum() < 50


def test_few_exchangeable_cells_are_refused(tmp_path: Path) -> None:
    """At most the rate, but for the draw: of 2,000 cells of new donors .05 with an error of .006."""
    atlas = written_atlas(tmp_path, draw_dataset("one", 3000, 1, donors=30))
    new = draw_dataset("new", 2000, 2).vectors
    for rate in (0.05, 0.2):
        refused = map_to(atlas, new, refuse_frac=rate).obs["cellmill_refused"].mean()
        assert refused == pytest.approx(rate, abs=0.02)
    assert map_to(atlas, new + 30).obs["cellmill_refused"].all()


def test_equal_vectors_are_one_neighbour(tmp_path: Path) -> None:
    """A donor of 200 equal cells has one vote, and the copies do not push others out."""
    base = draw_dataset("one", 30, 1, donors=2)
    vectors = np.concatenate([base.vectors, np.repeat(base.vectors[:1], 200, axis=0)])
    labels = np.array([*base.labels, *(200 * ["copied"])], object)
    donors = np.array([*base.donors, *(200 * ["copier"])], object)
    cells = EmbeddedCells("one", "kind", vectors, np.arange(230), labels, donors)
    atlas = written_atlas(tmp_path, cells, neighbors=6)
    assert atlas.record.n_points == 30
    mapped = map_to(atlas, base.vectors[:1] + np.float32(0.1))
    numbers = mapped.obsm["cellmill_neighbors"][0]
    assert len({*atlas.cells["point"][numbers]}) == 6
    assert mapped.obs["cellmill_donors"][0] == 3
    assert mapped.obs["cellmill_agreement"][0] <= 2 / 3 + 1e-6


def test_copies_of_a_cell_are_none_of_its_neighbours(tmp_path: Path) -> None:
    cells = draw_dataset("one", 60, 1)
    atlas = written_atlas(tmp_path, cells, neighbors=5)
    mapped = map_to(atlas, cells.vectors)
    assert mapped.obs["cellmill_in_atlas"].all()
    assert np.isnan(mapped.obs["cellmill_distance_percentile"]).all()
    assert not mapped.obs["cellmill_refused"].any()
    numbers = mapped.obsm["cellmill_neighbors"]
    assert (numbers != np.arange(60)[:, None]).all()
    assert "60 of 60 cells are in the atlas: no percentile" in mapped.lines


def test_an_atlas_of_one_donor_leaves_out_cells(tmp_path: Path) -> None:
    cells = draw_dataset("one", 40, 1, donors=1)
    atlas = written_atlas(tmp_path, cells, neighbors=3)
    points = stored_vectors(atlas)
    for stored, point in zip(atlas.reference, atlas.cells["point"]):
        others = [other for other in range(len(points)) if other != point]
        _, away = nearest_by_loops(points, points[point], 3, others)
        assert stored["distance"] == pytest.approx(np.mean(away), rel=1e-4)
    lines = map_to(atlas, cells.vectors + 1).lines
    assert any("the atlas has one donor" in line for line in lines)
    few = written_atlas(tmp_path / "few", draw_dataset("one", 1, 1))
    mapped = map_to(few, cells.vectors)
    assert np.isnan(mapped.obs["cellmill_distance_percentile"]).all()
    assert any(line.startswith("warning: no cell can be refused") for line in mapped.lines)
    one_donor = written_atlas(tmp_path / "ten", draw_dataset("one", 10, 1, donors=1))
    lines = map_to(one_donor, cells.vectors).lines
    assert not any("more often than that" in line for line in lines), "more often than nothing"


def test_a_map_warns_of_training_cells_that_are_not_known(tmp_path: Path) -> None:
    atlas = written_atlas(tmp_path, draw_dataset("one", 40, 1))
    seen = Seen(np.zeros(2, bool), "it lacks 5 genes")
    mapped = map_vectors(atlas, draw_dataset("new", 2, 2).vectors, seen, Map.model_validate({}))
    assert mapped.about["training_cells_unknown"] == "it lacks 5 genes"
    assert mapped.lines[-1] == (
        "warning: cells of the model's training may have a percentile, which is too low: it lacks 5 genes"
    )


def test_an_atlas_without_labels_still_measures_distances(tmp_path: Path) -> None:
    cells = draw_dataset("one", 80, 1)
    atlas = written_atlas(tmp_path, cells._replace(labels=np.full(80, None, object)))
    mapped = map_to(atlas, cells.vectors + 1)
    assert mapped.obs["cellmill_label"].isna().all()
    assert np.isfinite(mapped.obs["cellmill_distance_percentile"]).all()
    assert "warning: the atlas has no labels" in mapped.lines
    assert atlas.record.accuracy is None


NAMES = ["CD4-positive, alpha-beta T cell", "CD8-positive, alpha-beta T cell", "b cell", "neuron"]


@pytest.mark.parametrize("form", ["names", "ids"])
def test_terms_climb_as_a_loop_over_superclasses_does(tmp_path: Path, form: str) -> None:
    ontology = cell_ontology()
    ids = {name.casefold(): term for term, name in ontology.names.items()}
    labels = NAMES if form == "names" else [ids[name.casefold()] for name in NAMES]
    atlas = written_atlas(tmp_path, draw_dataset("one", 300, 1, labels=labels), neighbors=9)
    new = 0.5 * draw_dataset("new", 60, 2, labels=labels).vectors  # between the clusters
    mapped = map_to(atlas, new, refuse_frac=1e-6, certainty=0.75)
    points = stored_vectors(atlas)
    spelled = {ids[label.casefold()]: label for label in NAMES}
    climbed = set()
    for cell, vector in enumerate(new):
        scaled = vector / atlas.record.scale
        nearest, _ = nearest_by_loops(points, scaled, 9, list(range(len(points))))
        votes: Counter[str] = Counter()
        for label, share in vote_by_loops(atlas, nearest).items():
            for above in ontology.ancestors(ids.get(label.casefold(), label)):
                votes[above] += share  # type: ignore[assignment]
        enough = [term for term, share in votes.items() if share >= 0.75 - 1e-6]
        expected = min(enough, key=lambda term: (-ontology.information(term), term))
        label = mapped.obs["cellmill_label"][cell]
        name = expected if form == "ids" else spelled.get(expected, ontology.names[expected])
        assert label == name
        assert mapped.obs["cellmill_agreement"][cell] == pytest.approx(votes[expected], abs=1e-6)
        climbed.add(expected)
    assert len(climbed) > 4, "some cells have a superclass of the labels"


def test_information_counts_the_terms_below() -> None:
    ontology = cell_ontology()
    t_cell = "CL:0000084"
    below = [term for term in ontology.parents if t_cell in ontology.ancestors(term)]
    n = len(ontology.parents)
    assert ontology.information(t_cell) == pytest.approx(1 - np.log(len(below)) / np.log(n))
    assert ontology.information("CL:0000000") == 0
    share = ontology.information("CL:0000542") / ontology.information(t_cell)
    # T cell, lymphocyte, neuron, and no term: predicted in rows, true in columns
    credit = credit_labels([t_cell, "lymphocyte", "Neuron", "none of these"])
    np.testing.assert_allclose(credit, [[1, 0, 0, 0], [share, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    assert find_terms(["T cell", "no such cell"]) is None


def test_the_same_cells_give_the_same_bytes(tmp_path: Path) -> None:
    one = draw_dataset("one", 150, 1)
    two = draw_dataset("two", 100, 2)
    written_atlas(tmp_path / "first", one, two)
    written_atlas(tmp_path / "again", one, two)
    written_atlas(tmp_path / "turned", two, one)
    for name in ("vectors.npy", "cells.npy", "reference.npy", "atlas.json"):
        expected = (tmp_path / "first" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == expected, name
    expected = (tmp_path / "first" / "vectors.npy").read_bytes()
    assert (tmp_path / "turned" / "vectors.npy").read_bytes() == expected


def test_a_graph_finds_what_an_exact_search_finds(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    cells = draw_dataset("one", 4000, 1)
    exact = written_atlas(tmp_path / "exact", cells)
    by_graph = written_atlas(tmp_path / "graph", cells, max_exact=100)
    written_atlas(tmp_path / "again", cells, max_exact=100)
    assert exact.points.graph is None
    assert by_graph.points.graph is not None
    stored = (tmp_path / "graph" / "graph.faiss").read_bytes()
    assert (tmp_path / "again" / "graph.faiss").read_bytes() == stored
    queries = draw_dataset("new", 500, 2).vectors / np.float32(exact.record.scale)
    expected, distances = exact.points.nearest(queries, 15)
    found, also = by_graph.points.nearest(queries, 15)
    same = [len({*a} & {*b}) for a, b in zip(expected, found)]
    assert np.mean(same) > 0.98 * 15
    is_same = (found == expected).all(axis=1)
    assert (also[is_same] == distances[is_same]).all(), "distances do not depend on the search"


def test_a_search_for_more_points_than_there_are_ends() -> None:
    points = Points(np.eye(3, dtype=np.float16))
    found, distances = points.nearest(np.zeros((2, 3), np.float32), 5)
    assert found.tolist() == [[0, 1, 2, NOWHERE, NOWHERE]] * 2
    assert np.isinf(distances[:, 3:]).all()
    assert points.nearest(np.zeros((0, 3), np.float32), 5)[0].shape == (0, 5)


@pytest.mark.parametrize("name", ["vectors.npy", "cells.npy", "reference.npy"])
def test_a_damaged_file_of_an_atlas_is_named(tmp_path: Path, name: str) -> None:
    written_atlas(tmp_path, draw_dataset("one", 50, 1))
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"{name}: expected sha256 .{{12}} as in atlas.json, got "):
        CellAtlas.read(tmp_path, DIGEST, WIDTH)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: no such file; make the atlas again"):
        CellAtlas.read(tmp_path, DIGEST, WIDTH)


def test_a_damaged_record_of_an_atlas_is_one_line(tmp_path: Path) -> None:
    written_atlas(tmp_path, draw_dataset("one", 50, 1))
    path = tmp_path / "atlas.json"
    record = json.loads(path.read_text())
    for entries, message in (
        ({"n_points": 49}, "vectors.npy: expected <f2 of shape "),
        ({"labels": ["a"]}, "cells.npy: damaged: it has a label of no entry; make the atlas again"),
        ({"donors": []}, "cells.npy: damaged: it has a donor of no entry"),
        ({"format": 2}, "atlas.json: format: "),
        ({"library": "faiss 1"}, "graph.faiss: no such file"),
        ({"other": 1}, "atlas.json: unknown key 'other'"),
    ):
        path.write_text(json.dumps(record | entries))
        with pytest.raises((ConfigError, DataError)) as raised:
            CellAtlas.read(tmp_path, DIGEST, WIDTH)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
    path.write_text(json.dumps(record)[:99])
    with pytest.raises(
        DataError, match=r"atlas.json: not valid JSON .*; make the atlas again \(the"
    ):
        CellAtlas.read(tmp_path, DIGEST, WIDTH)
    path.write_text(json.dumps(record))
    with pytest.raises(
        DataError, match=r"expected an atlas of model eeeeeeeeeeee, got of dddddddddddd; make "
    ):
        CellAtlas.read(tmp_path, "e" * 64, WIDTH)
    with pytest.raises(
        DataError, match=r"expected vectors of 9 numbers as of the model, got 8; make "
    ):
        CellAtlas.read(tmp_path, DIGEST, 9)
    with pytest.raises(DataError, match=r"none/atlas.json: no such file; make the atlas again"):
        CellAtlas.read(tmp_path / "none", DIGEST, WIDTH)


@pytest.fixture(scope="module")
def mapped_model(
    tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path], simulated: Path
) -> Path:
    """A model in a folder with a space, with the atlas of half of the simulated cells."""
    folder = tmp_path_factory.mktemp("with atlas") / "a model"
    shutil.copytree(corpus["model"], folder)
    cells = ad.read_h5ad(simulated)
    cells[:300].copy().write_h5ad(folder.parent / "half.h5ad")
    embedded = embed(folder, folder.parent / "half.h5ad", folder.parent / "embedded" / "half.h5ad")
    words = [
        "--embeddings",
        str(embedded),
        "--labels",
        "cell_type",
        "--donor-columns",
        "none,batch",
    ]
    assert main(["atlas", "--model", str(folder), *words, "--neighbors", "9"]) == 0
    return folder


def test_the_command_and_python_map_alike(
    tmp_path: Path, mapped_model: Path, simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(mapped_model, moved)
    out = tmp_path / "out.h5ad"
    words = ["--model", str(moved), "--input", str(simulated), "--out", str(out), "--append"]
    assert main(["map", *words, "--refuse-frac", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "simulated: 300 of 600 cells are in the atlas: no percentile" in printed
    written = ad.read_h5ad(out)
    adata = ad.read_h5ad(simulated)
    mapped = cellmill.load(mapped_model).map(adata, refuse_frac=0.1)
    mapped.add_to(adata)
    assert (written.X != adata.X).nnz == 0
    for name, column in mapped.obs.items():
        expected = pd.Series(column).astype(str).tolist()
        assert written.obs[name].astype(str).tolist() == expected, name
    for name, table in mapped.obsm.items():
        np.testing.assert_array_equal(written.obsm[name], table)
    assert written.obsm["X_cellmill"].shape == (600, 16)
    assert written.uns["cellmill_map"]["n_in_atlas"] == 300
    assert written.uns["cellmill_map"]["neighbors"] == 9
    table = pd.read_csv(out.with_suffix(".map.tsv"), sep="\t", index_col="cell")
    assert table.index.tolist() == adata.obs_names.tolist()
    assert table.columns.tolist() == list(mapped.obs)
    assert (written.obs["cellmill_donors"] <= 2).all()
    assert main(["map", *words[:4], "--out", str(out), "--append", "--certainty", "0.5"]) == 2
    assert "map.certainty: input should be greater than 0.5" in capsys.readouterr().err


def test_a_killed_map_leaves_no_table_of_other_cells(
    tmp_path: Path, mapped_model: Path, simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.h5ad"
    words = ["map", "--model", str(mapped_model), "--input", str(simulated), "--out", str(out)]
    assert main(words) == 0
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(stages_atlas, "write_prediction", lambda *_: sys.exit(137))
        with pytest.raises(SystemExit):
            main([*words, "--refuse-frac", "0.2"])
    assert [*tmp_path.iterdir()] == [out]
    assert out.read_bytes() == before
    assert main(words) == 0
    assert out.with_suffix(".map.tsv").exists()


def test_donors_are_those_of_the_first_column_there_is(mapped_model: Path) -> None:
    half = mapped_model.parent / "embedded" / "half.h5ad"
    record = json.loads((mapped_model / "atlas" / "atlas.json").read_text())
    assert [donor["name"] for donor in record["donors"]] == ["batch_0", "batch_1"]
    obs = ad.read_h5ad(half).obs
    for columns, expected in (
        (["none", "cell_type", "batch"], obs["cell_type"].astype(str).tolist()),
        (["none"], 300 * [""]),
    ):
        section = Atlas.model_validate({"donor_columns": columns})
        cells = read_embedded(half, "-", section.donor_columns, record["model_digest"], 16)
        assert cells.donors.tolist() == expected


@pytest.mark.parametrize("writer", ["anndata 0.7", "SeuratDisk"])
def test_codes_of_older_layouts_are_read_as_texts(
    writer: str, tmp_path: Path, mapped_model: Path
) -> None:
    path = Path(shutil.copy(mapped_model.parent / "embedded" / "half.h5ad", tmp_path))
    with h5py.File(path, "a") as file:
        obs = file["obs"]
        obs.attrs["encoding-version"] = "0.1.0"
        for name in ("cell_type", "batch"):
            codes, texts = obs[name]["codes"][:], obs[name]["categories"][:]
            codes[7] = -1
            del obs[name]
            obs[name] = codes
            obs[f"__categories/{name}"] = texts
            if writer == "anndata 0.7":
                obs[name].attrs["categories"] = obs[f"__categories/{name}"].ref
    expected = ad.read_h5ad(mapped_model.parent / "half.h5ad").obs.astype(str)
    expected.iloc[7] = ""
    record = json.loads((mapped_model / "atlas" / "atlas.json").read_text())
    cells = read_embedded(path, "cell_type", ["batch"], record["model_digest"], 16)
    assert ["" if text is None else text for text in cells.labels] == [*expected["cell_type"]]
    assert [*cells.donors] == [*expected["batch"]]
    assert "__categories" not in cells.obs_columns


def test_the_same_weights_with_other_options_are_refused(
    tmp_path: Path, mapped_model: Path, simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(mapped_model, model)
    config = json.loads((model / "config.json").read_text())
    config["tokens"]["max_tokens"] -= 1
    (model / "config.json").write_text(json.dumps(config))
    half = str(mapped_model.parent / "embedded" / "half.h5ad")
    of_cells = ["--input", str(simulated), "--out", str(tmp_path / "out.h5ad")]
    of_atlas = ["--embeddings", half, "--labels", "-", "--atlas", str(tmp_path / "atlas")]
    told = "the model's weights with other sections model or tokens of config.json; "
    for words, message in (
        (["map", *of_cells], f"an atlas of {told}make the atlas again"),
        (["atlas", *of_atlas], f"half.h5ad: made by {told}run embed again"),
    ):
        assert main([words[0], "--model", str(model), *words[1:]]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(DataError, match="an atlas of the model's weights with other sections"):
        cellmill.load(model).map(ad.read_h5ad(simulated)[:5])


def test_wrong_inputs_of_an_atlas_are_one_line(
    tmp_path: Path, mapped_model: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    half = mapped_model.parent / "embedded" / "half.h5ad"
    other = export_model(tmp_path / "other", corpus["vocabulary"], seed=3)
    made = [
        "atlas",
        "--model",
        str(mapped_model),
        "--atlas",
        str(tmp_path / "atlas"),
        "--embeddings",
    ]
    cells = ad.read_h5ad(mapped_model.parent / "half.h5ad")
    cells[:0].copy().write_h5ad(tmp_path / "empty.h5ad")
    del cells.var["symbol"]
    cells.var_names = [f"ENSMUSG{number:011d}" for number in range(cells.n_vars)]
    cells.write_h5ad(tmp_path / "mouse.h5ad")
    onto = ["map", "--out", str(tmp_path / "out.h5ad"), "--input"]
    for words, message in (
        ([*made, str(half), "--labels", "kind"], "half.h5ad: no obs column 'kind'; "),
        (
            [*made, str(half), "--labels", "-", "--donor-columns", "btach"],
            "atlas.donor_columns: no obs column 'btach'; did you mean 'batch'?\n",
        ),
        (
            [*made, str(half), "--labels", "-", "-"],
            "expected as many --labels as --embeddings, got 2 and 1",
        ),
        (
            [*made, str(half), str(half), "--labels", "-", "-"],
            "--embeddings: two files are called 'half'",
        ),
        (
            ["atlas", "--model", str(other), "--embeddings", str(half), "--labels", "-"],
            "half.h5ad: made by model ",
        ),
        (
            [*onto, str(half), "--model", str(other)],
            f"{other}/atlas/atlas.json: no such file; make the atlas first: cellmill atlas --model {other} "
            "--embeddings EMBEDDED.h5ad --labels COLUMN\n",
        ),
        (
            [*onto, str(tmp_path / "mouse.h5ad"), "--model", str(mapped_model)],
            "mouse.h5ad: ",
        ),
        ([*onto, str(tmp_path / "empty.h5ad"), "--model", str(mapped_model)], "empty.h5ad: "),
        (
            [*onto, str(half), "--model", str(other), "--atlas", str(mapped_model / "atlas")],
            "atlas.json: expected an atlas of model ",
        ),
    ):
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error
    assert not [*tmp_path.glob("out*")]
    assert not (tmp_path / "atlas").exists()


def test_a_donor_column_in_no_file_gets_a_warning_by_others(
    tmp_path: Path, mapped_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = mapped_model.parent / "embedded" / "half.h5ad"
    words = ["--model", str(mapped_model), "--atlas", str(tmp_path), "--embeddings", str(half)]
    words += ["--labels", "-"]
    line = "warning: atlas.donor_columns: no obs column 'btach'; did you mean 'batch'?\n"
    assert main(["atlas", *words, "--donor-columns", "btach,batch"]) == 0
    assert line in capsys.readouterr().out
    assert main(["atlas", *words]) == 0
    assert "no obs column" not in capsys.readouterr().out, "donor and batch are the defaults"


def test_a_missing_atlas_is_told_before_torch_is_imported(
    tmp_path: Path, mapped_model: Path, corpus: dict[str, Path]
) -> None:
    model = tmp_path / "results" / "runs" / "my run" / "model"
    shutil.copytree(corpus["model"], model)
    script = (
        "import sys; from cellmill.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ["map", "--model", str(model), "--input", "a.h5ad", "--out", "b.h5ad"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"cellmill map: {model}/atlas/atlas.json: no such file; make the atlas first: "
        "cellmill run -- 'results/runs/my run/model/atlas/atlas.json'\n"
    )
    with pytest.raises(DataError, match=r"make the atlas first: cellmill run -- 'results/runs/my "):
        cellmill.load(model).map(ad.read_h5ad(mapped_model.parent / "half.h5ad"))
    with pytest.raises(
        DataError, match=r"cellmill atlas --model .+/model' --atlas /none --embeddings "
    ):
        find_atlas(model, Path("/none"))


@pytest.mark.parametrize("stage", ["map", "embed", "seen"])
@pytest.mark.parametrize("name", [".", "vocabulary.tsv"])
def test_a_path_that_is_no_model_folder_is_named(
    tmp_path: Path,
    corpus: dict[str, Path],
    stage: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(corpus["model"] / "vocabulary.tsv", tmp_path)
    path = tmp_path / name
    words = ["--input", str(corpus["cells"]), "--out", str(tmp_path / "out.h5ad")]
    assert main([stage, "--model", str(path), *words]) == 2
    assert capsys.readouterr().err == (
        f"cellmill {stage}: {path}: no model folder (no config.json); a model is results/runs/RUN/model\n"
    )


def test_map_tells_a_low_coverage_of_counts(
    tmp_path: Path, mapped_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ad.read_h5ad(mapped_model.parent / "half.h5ad")[:20].copy()
    foreign = ad.AnnData(9 * cells.X, cells.obs, pd.DataFrame(index=cells.var_names + " foreign"))
    mixed = ad.concat([cells, foreign], axis="var", merge="first")
    mixed.write_h5ad(tmp_path / "mixed.h5ad")
    words = ["--input", str(tmp_path / "mixed.h5ad"), "--out", str(tmp_path / "out.h5ad")]
    line = (
        "only 10.0% of its counts fall on genes that the model knows: compare its vectors with each "
        "other only"
    )
    options = ["--min-coverage-frac", "0.05"]
    assert main(["map", "--model", str(mapped_model), *words, *options]) == 0
    printed = capsys.readouterr().out
    assert "mixed: 10.0% of counts on known genes\n" in printed
    assert f"mixed: warning: {line}\n" in printed
    model = cellmill.load(mapped_model)
    with pytest.warns(UserWarning, match=f"^adata: {line}$"):
        model.map(mixed, min_coverage_frac=0.05)


def test_wrong_arguments_in_python_name_what_is_right(mapped_model: Path) -> None:
    model = cellmill.load(mapped_model)
    cells = ad.read_h5ad(mapped_model.parent / "half.h5ad")
    message = r"^expected an AnnData, got 'a\.h5ad'; to read a file: anndata\.read_h5ad\(path\)$"
    for method in (model.embed, model.seen, model.map):
        with pytest.raises(ConfigError, match=message):
            method("a.h5ad")
    with pytest.raises(ConfigError, match=r"^expected an AnnData, got 3; "):
        model.embed(3)
    message = r"^map: unknown argument 'refuse_fraction'; did you mean 'refuse_frac'\?$"
    with pytest.raises(ConfigError, match=message):
        model.map(cells, refuse_fraction=0.1)
    message = r"^embed: unknown argument 'token_budgt'; did you mean 'token_budget'\?$"
    with pytest.raises(ConfigError, match=message):
        model.embed(cells, token_budgt=5)


def test_cells_of_the_atlas_only_are_no_new_cells(tmp_path: Path) -> None:
    cells = draw_dataset("one", 60, 1)
    lines = map_to(written_atlas(tmp_path, cells, neighbors=5), cells.vectors).lines
    assert lines[0] == "60 of 60 cells have a label, 0 are refused (no new cells)"
