"""Presets of external models through Snakemake: their jobs, and what they make of real cells."""

import json
import os
import re
import subprocess
import sys

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill import open_cells
from cellmill.config.evaluate import PRESETS
from tests.unit.conftest import SHARED
from tests.workflow.conftest import REPOSITORY, Project, jobs_in

pytestmark = pytest.mark.xdist_group("workflow")
SCRIPTS = REPOSITORY / "workflow" / "bridges"
TABLE = "dataset\tpath\tlabel\tbatch\nsim\tdata/sim.h5ad\tcell_type\tbatch\n"
EXTERNAL = {"vae": {"preset": "scvi"}, "mixed": {"preset": "harmony"}}
STAGES = ["preprocess", "vocabulary", "shard", "plan", "train", "consolidate", "embed", "evaluate"]


def test_a_preset_is_fitted_by_its_python_after_the_split(
    project: Project,
) -> None:
    (project.folder / "config" / "datasets.tsv").write_text(TABLE)
    (project.folder / "scvi-python").write_text("content")
    config = project.write_config(
        "zoo.yaml", evaluate={"external": EXTERNAL}, bridges={"scvi": "./scvi-python"}
    )
    target = "results/runs/tiny/evaluate/metrics.json"
    shown = project.ran("-n", "-p", "--configfile", config, "--", target)
    assert jobs_in(shown) == dict.fromkeys(STAGES, 1) | {"unpack": 1, "zoo": 2}
    for preset, python in (("scvi", "./scvi-python"), ("harmony", "python")):
        made = f"results/corpora/sim/zoo/{preset}/sim.h5ad"
        assert (
            f"Shell command: {python} -W ignore {SCRIPTS}/zoo_{preset}.py --cells "
            "results/corpora/sim/unpacked/sim.h5ad "
            f"--manifest results/corpora/sim/shards/manifest.json --threads 2 --out {made} 2>&1 "
            f"| tee -i logs/zoo/sim.{preset}.sim.log"
        ) in shown.replace(f"'{SCRIPTS}", str(SCRIPTS))
    assert project.jobs("--configfile", config, "--", made) == dict.fromkeys(
        [*STAGES[:3], "unpack", "zoo"], 1
    )
    [files] = re.findall(r"cellmill evaluate .* --external (\S+ \S+) --labels", shown)
    assert files.split() == [
        f"results/corpora/sim/zoo/{preset}/sim.h5ad" for preset in ("scvi", "harmony")
    ]


def python_of(preset: str, module: str) -> str:
    """Interpreter that has the package: of CELLMILL_SCVI or CELLMILL_HARMONY, or this one."""
    python = os.environ.get(f"CELLMILL_{preset.upper()}", sys.executable)
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(
            f"{module} is not installed in {python}; CELLMILL_{preset.upper()} names another"
        )
    return python


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_presets_are_rows_next_to_the_model(
    project: Project,
) -> None:
    bridges = {"scvi": python_of("scvi", "scvi"), "harmony": python_of("harmony", "harmonypy")}
    source = SHARED / "cellbench.h5ad"
    if not source.is_file():
        pytest.skip(f"the real dataset cellbench is not there: {SHARED} is absent")
    real = ad.read_h5ad(source)[::4]  # 352 cells of 5 lines and 5 batches
    data = project.folder / "data" / "sim.h5ad"
    data.unlink()
    counts = np.asarray(real.X.sum(axis=0)).ravel()
    real[:, np.sort(np.argsort(-counts, kind="stable")[:1000])].copy().write_h5ad(data)
    (project.folder / "config" / "datasets.tsv").write_text(TABLE)
    tasks = {
        "probe": {"neighbors": 5, "seeds": 1},
        "few_shot": {"shots": [5], "draws": 2},
        "integration": {},
    }
    project.write_config(evaluate={"external": EXTERNAL, "tasks": tasks}, bridges=bridges)
    project.ran()
    results = project.folder / "results"
    of_tasks = json.loads((results / "runs/tiny/evaluate/metrics.json").read_text())["datasets"][
        "sim"
    ]["tasks"]
    names = {"external: vae (fitted on training cells)", "external: mixed (transductive)"}
    for task in tasks:
        rows = [row for row in of_tasks[task]["rows"] if row["method"]["kind"] == "external"]
        assert {row["method"]["features"] for row in rows} == names, task
    page = (results / "report/index.html").read_text()
    assert all(f"{name} + kNN" in page for name in names)
    best = max(
        row["scores"]["accuracy"]["mean"]
        for row in of_tasks["probe"]["rows"]
        if row["name"].startswith("external: vae")
    )
    [majority] = (
        row["scores"]["accuracy"]["mean"]
        for row in of_tasks["probe"]["rows"]
        if row["name"] == "majority"
    )
    assert best > majority + 0.2  # five cell lines, of which scVI has seen no label
    shards = results / "corpora/sim/shards"
    split = json.loads((shards / "manifest.json").read_text())["splits"]["train"]
    n_train = split["n_obs"]
    for preset in PRESETS:
        last = (project.folder / f"logs/zoo/sim.{preset}.sim.log").read_text().splitlines()[-1]
        assert re.match(
            rf"sim: preset {preset}: \S+ \S+, fitted on {n_train} training cells, ", last
        ), last
    assert project.jobs() == {}

    cells = open_cells(results / "corpora/sim/cells/sim.h5ad")
    first = ad.read_h5ad(results / "corpora/sim/zoo/scvi/sim.h5ad").obsm["X_cellmill"]
    names_of_train = [
        name for shard in split["shards"] for name in ad.read_h5ad(shards / shard["name"]).obs_names
    ]
    train = np.isin("sim:" + cells.obs_names.to_numpy().astype(object), names_of_train)
    assert train.sum() == n_train
    # a held-out or validation cell
    counts = cells.X.toarray()
    other = np.flatnonzero(~train)[0]
    counts[other] = 1
    cells.X = sp.csr_matrix(counts)
    changed = project.folder / "changed" / "sim.h5ad"
    out = project.folder / "changed" / "out.h5ad"
    changed.parent.mkdir()
    cells.write_h5ad(changed)
    words = [
        "--cells",
        changed,
        "--manifest",
        shards / "manifest.json",
        "--threads",
        2,
        "--out",
        out,
    ]
    command = [bridges["scvi"], "-W", "ignore", SCRIPTS / "zoo_scvi.py", *words]
    subprocess.run(
        [str(word) for word in command], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    differs = (ad.read_h5ad(out).obsm["X_cellmill"] != first).any(axis=1)
    assert np.flatnonzero(differs).tolist() == [other]
