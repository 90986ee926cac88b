"""A combination of genes has one name before any split; controls are counted, and those without a
guide are named.
"""

import html
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.perturbations import TargetNames, merge_names
from cellmill.data.prepare.qc_lines import describe_merged
from cellmill.report.collect import read_corpus
from cellmill.report.page import render
from tests.unit.small_corpus import prepare_by_commands
from tests.unit.test_named_files import write_config

Make = Callable[..., Path]

GENES = ["TP53", "MYC", "BRCA2", "DPM1", "HLA-A", "Y_RNA"]
COMBINATIONS = {
    "TP53+MYC": "MYC+TP53",
    "MYC+TP53": "MYC+TP53",
    "MYC + TP53": "MYC+TP53",
    "MYC_TP53": "MYC+TP53",
    "TP53;MYC": "MYC+TP53",
    "TP53, MYC": "MYC+TP53",
    "TP53|MYC": "MYC+TP53",
    "TP53 || MYC": "MYC+TP53",
    "BRCA2+TP53+MYC": "BRCA2+MYC+TP53",
    "TP53+ctrl": "TP53",
    "ctrl+TP53": "TP53",
    "TP53+TP53": "TP53",
    "TP53_NegCtrl0": "TP53",
    "non_targeting_TP53": "TP53",
    "TP53_non-targeting_2": "TP53",
    "non-targeting || MYC": "MYC",
    "KRAS+EGFR": "EGFR+KRAS",  # genes of the tables, though not of the file
    "ENSG00000141510+MYC": "ENSG00000141510+MYC",
    "HLA-A+MYC": "HLA-A+MYC",
    "MYC_HLA-A": "HLA-A+MYC",
    "ctrl+ctrl": "ctrl",
    "ctrl": "ctrl",
}
WHOLE = [
    "TP53",
    "HLA-A",
    "Y_RNA",
    "NKX2-1",
    "TP53_1",
    "sgMYC_2",
    "MYC_guide",
    "drug A+drug B",
    "AC012345.1",
    "MT-ND1",
]


@pytest.mark.parametrize(("text", "name"), COMBINATIONS.items())
def test_a_combination_of_genes_has_one_name(text: str, name: str) -> None:
    assert merge_names([text], ["ctrl"], TargetNames(GENES, "human")).names == {text: name}


@pytest.mark.parametrize("text", WHOLE)
def test_a_gene_with_a_delimiter_in_its_name_stays_whole(text: str) -> None:
    found = merge_names([text], ["ctrl"], TargetNames(GENES, "human"))
    assert found.names == {text: text}
    assert found.undivided == {}


@pytest.mark.parametrize("delimiter", [":", "/", "&", " ", "--", "-", " and "])
def test_genes_joined_by_an_unknown_delimiter_are_named(delimiter: str) -> None:
    text = f"TP53{delimiter}MYC"
    found = merge_names([text], [], TargetNames(GENES, "human"))
    assert found.names == {text: text}
    assert found.undivided == {text: delimiter}


def test_alternative_names_of_a_combination_are_reported() -> None:
    found = merge_names(
        ["drug+TP53", "TP53+drug", "drug+MYC", "sg_1"], ["ctrl"], TargetNames(GENES, "human")
    )
    assert set(found.names.items()) == {(text, text) for text in found.names}
    assert found.reordered == [["TP53+drug", "drug+TP53"]]
    report = found.report(np.array(["drug+TP53", "TP53+drug", "drug+MYC"], object))
    assert describe_merged(report) == [
        "warning: perturbation: 'TP53+drug' and 'drug+TP53' have the same parts in another order, not all of them "
        "genes: they stay different perturbations; give them one name if they are one"
    ]


def test_numbers_of_rows_make_no_combination_of_a_guide(make_h5ad: Make) -> None:
    guides = ["TP53_1", "TP53_2", "TP53_MYC", "ctrl"]
    path = make_h5ad(
        sp.csr_matrix(np.ones((4, 3), np.float32)),
        genes=["0", "1", "2"],
        obs=pd.DataFrame({"guide": guides}, index=list("abcd")),
    )
    with open_counts(path) as reader:
        names = merge_names(guides, ["ctrl"], TargetNames.read(reader, "human")).names
    assert names == {text: text for text in guides} | {"TP53_MYC": "MYC+TP53"}


def test_without_an_organism_genes_are_those_in_the_file() -> None:
    found = merge_names(["g2_g1", "KRAS_EGFR"], [], TargetNames(["g1", "g2"], None)).names
    assert found == {"g2_g1": "g1+g2", "KRAS_EGFR": "KRAS_EGFR"}


def write_cells(make: Make, obs: dict[str, Any], depth: np.ndarray | float = 1.0) -> Path:
    """Cells of these obs columns, with counts times `depth`."""
    n = len(next(iter(obs.values())))
    random = np.random.default_rng(0)
    matrix = (random.poisson(3, (n, len(GENES))) + 1.0) * np.broadcast_to(depth, n)[:, None]
    frame = pd.DataFrame(obs, index=[f"cell_{i}" for i in range(n)])
    return make(sp.csr_matrix(matrix.astype(np.float32)), "one.h5ad", genes=GENES, obs=frame)


OPTIONS = "preprocess: {min_genes: 1, max_mito_frac: 1}\nshard: {cells_per_shard: 64, split_by: perturbation}\n"


def test_no_combination_is_in_two_splits(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        "TP53+MYC",
        "MYC+TP53",
        "TP53+ctrl",
        "ctrl+TP53",
        "BRCA2",
        "DPM1",
        "ctrl",
        "BRCA2+MYC",
        "MYC+BRCA2",
    ]
    raw = write_cells(make_h5ad, {"guides": texts * 20})
    row = {"path": raw, "perturbation": "guides", "control": "ctrl"}
    config = write_config(tmp_path, OPTIONS, one=row)
    [cells], manifest = prepare_by_commands(config, tmp_path)

    truth = {"BRCA2+MYC": 40, "MYC+TP53": 40, "TP53": 40, "BRCA2": 20, "DPM1": 20, "ctrl": 20}
    stored = ad.read_h5ad(cells).obs
    assert Counter(stored["perturbation"]) == truth
    assert (stored["is_control"] == (stored["guides"] == "ctrl")).all()
    by_split: dict[str, set[str]] = {}
    for path in manifest.parent.glob("*.h5ad"):
        by_split.setdefault(path.name.split("-")[0], set()).update(
            ad.read_h5ad(path).obs["perturbation"]
        )
    assert len(by_split) == 3
    assert Counter(name for names in by_split.values() for name in names) == dict.fromkeys(truth, 1)
    report = json.loads(cells.with_suffix(".json").read_text())
    assert report["perturbations"]["merged"]["MYC+TP53"] == {"MYC+TP53": 20, "TP53+MYC": 20}
    assert (
        "one: perturbation: 120 cells have one name for each combination: 'BRCA2+MYC' 20, 'MYC+BRCA2' 20 as "
        "'BRCA2+MYC'; 'MYC+TP53' 20, 'TP53+MYC' 20 as 'MYC+TP53'; 'TP53+ctrl' 20, 'ctrl+TP53' 20 as 'TP53'"
    ) in capsys.readouterr().out.splitlines()


def prepared(
    make: Make, folder: Path, obs: dict[str, Any], depth: np.ndarray | float = 1.0, **row: str
) -> pd.DataFrame:
    """obs of the preprocessed cells."""
    raw = write_cells(make, obs, depth)
    options = OPTIONS.replace(", split_by: perturbation", "")
    config = write_config(folder, options, one={"path": raw, "perturbation": "target", **row})
    [cells], _ = prepare_by_commands(config, folder)
    return ad.read_h5ad(cells).obs


def test_several_values_are_controls_under_one_name(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["NT", "safe", "TP53", "MYC", "safe+NT", "MYC+safe"] * 20
    obs = prepared(make_h5ad, tmp_path, {"target": targets}, control="NT|safe")
    assert Counter(obs["perturbation"]) == {"NT": 60, "TP53": 20, "MYC": 40}
    assert Counter(obs.loc[obs["is_control"], "perturbation"]) == {"NT": 60}
    said = capsys.readouterr().out
    assert "one: controls: 60 cells ('NT' 20, 'safe' 20, 'safe+NT' 20), median counts " in said


def test_combinations_of_a_condition_have_one_name_too(make_h5ad: Make, tmp_path: Path) -> None:
    """As in files that were made for GEARS, whose column is called condition."""
    raw = write_cells(
        make_h5ad, {"condition": ["ctrl", "TP53+ctrl", "ctrl+TP53", "MYC+TP53", "TP53+MYC"] * 20}
    )
    row = {"path": raw, "condition": "condition", "control": "ctrl"}
    config = write_config(tmp_path, OPTIONS.replace(", split_by: perturbation", ""), one=row)
    [cells], _ = prepare_by_commands(config, tmp_path)
    assert Counter(ad.read_h5ad(cells).obs["condition"]) == {"ctrl": 20, "TP53": 40, "MYC+TP53": 40}


def test_a_value_with_the_separator_in_it_is_one_control(make_h5ad: Make, tmp_path: Path) -> None:
    obs = prepared(make_h5ad, tmp_path, {"target": ["a|b", "TP53"] * 20}, control="a|b")
    assert Counter(obs["is_control"]) == {True: 20, False: 20}


def test_a_difference_in_depth_from_controls_is_reported(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = np.array(["ctrl", "TP53"] * 40)
    depth = np.where(targets == "ctrl", 1.0, 4.0)
    prepared(make_h5ad, tmp_path, {"target": targets}, depth, control="ctrl")
    report = json.loads(next(tmp_path.rglob("one.json")).read_text())["controls"]
    ratio = report["median_counts_controls"] / report["median_counts_perturbed"]
    assert ratio == pytest.approx(1 / 4, rel=0.1)
    said = capsys.readouterr().out
    assert (
        f"one: warning: controls: their median counts are {ratio:.2g} times the perturbed cells': "
        in said
    )


@pytest.mark.parametrize("named", [True, False])
def test_controls_without_a_control_guide_are_named(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    """Cells without a guide, and cells with a targeting guide, that a table calls control."""
    cells = [("intergenic_1", "ctrl"), ("intergenic_2", "ctrl"), ("", "ctrl"), ("sgTP53_1", "ctrl")]
    cells += [("sgTP53_1", "TP53"), ("sgTP53_2", "TP53"), ("sgMYC_1", "MYC"), ("sgMYC_2", "MYC")]
    guides, targets = zip(*(cells * 10))
    column = {"what": "guide"} if not named else {"what": "barcode"}
    row = {"guide": column["what"]} if named else {}
    obs = {column["what"]: list(guides), "target": list(targets), "guide of nothing": ["x"] * 80}
    prepared(make_h5ad, tmp_path, obs, control="ctrl", **row)
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"one: warning: controls: 10 of 40 have no guide in obs column {column['what']!r}: their perturbation is "
        "unknown; leave them out by the dataset's filter"
    ) in lines
    assert (
        f"one: warning: controls: 10 of 40 have a guide in obs column {column['what']!r} that perturbed cells have "
        "too: 'sgTP53_1' 10; leave them out by the dataset's filter"
    ) in lines


def test_the_report_shows_what_was_merged(make_h5ad: Make, tmp_path: Path) -> None:
    prepared(make_h5ad, tmp_path, {"target": ["ctrl", "TP53+MYC", "MYC+TP53"] * 20}, control="ctrl")
    folder = next(tmp_path.rglob("one.json")).parents[1]
    page = html.unescape(render("x", [], [read_corpus(folder)]))
    for line in json.loads((folder / "cells" / "one.json").read_text())["notes"]:
        assert f'<p class="note">{line[0].upper()}{line[1:]}.</p>' in page
    merged = "Perturbation: 40 cells have one name for each combination: 'MYC+TP53' 20, 'TP53+MYC' 20 as 'MYC+TP53'."
    assert merged in page
