"""The whole workflow through Snakemake, and the rules that a change reruns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from tests.workflow.conftest import Project

pytestmark = pytest.mark.xdist_group("workflow")  # all use the same finished project

CORPUS = ["preprocess", "vocabulary", "shard"]
RUN = ["plan", "train", "consolidate", "embed", "evaluate"]
EVERYTHING = [*CORPUS, *RUN, "report"]
FILES = {
    "preprocess": ["results/corpora/sim/cells/sim.h5ad", "results/corpora/sim/cells/sim.json"],
    "vocabulary": ["results/corpora/sim/vocabulary.tsv"],
    "shard": ["results/corpora/sim/shards/manifest.json"],
    "plan": ["results/runs/tiny/plan.json"],
    "train": ["results/runs/tiny/train/status.json"],
    "consolidate": [
        f"results/runs/tiny/model/{name}"
        for name in ("model.safetensors", "config.json", "vocabulary.tsv", "README.md")
    ],
    "embed": ["results/runs/tiny/embeddings/sim.h5ad"],
    "evaluate": ["results/runs/tiny/evaluate/metrics.json", "results/runs/tiny/evaluate/umap.tsv"],
    "report": ["results/report/index.html"],
}
NAMES = {"preprocess": "sim.sim", "vocabulary": "sim", "shard": "sim", "embed": "tiny.sim", "report": "report"}


@pytest.mark.parametrize("stage", EVERYTHING)
def test_the_stage_writes_its_files_its_log_and_its_benchmark(done: tuple[Project, str], stage: str) -> None:
    folder = done[0].folder
    name = NAMES.get(stage, "tiny")
    for file in [*FILES[stage], f"results/benchmarks/{stage}/{name}.tsv"]:
        assert (folder / file).stat().st_size > 0
    log = (folder / "logs" / stage / f"{name}.log").read_text()
    assert log.strip()
    assert log in done[1]


def test_training_prints_its_progress_to_the_terminal_and_the_log(done: tuple[Project, str]) -> None:
    steps = re.findall(r"^step (\d+)/12  loss \d", done[1], re.M)
    assert steps[0] == "1"
    assert steps[-1] == "12"
    assert "step 12/12  validation loss " in (done[0].folder / "logs/train/tiny.log").read_text()


def test_the_results_belong_to_the_cells(done: tuple[Project, str]) -> None:
    results = done[0].folder / "results"
    qc = json.loads((results / "corpora/sim/cells/sim.json").read_text())
    embedded = ad.read_h5ad(results / "runs/tiny/embeddings/sim.h5ad")
    assert embedded.obsm["X_cellmill"].shape == (qc["cells"]["out"], 16)
    assert np.isfinite(embedded.obsm["X_cellmill"]).all()
    assert "cell_type" in embedded.obs
    status = json.loads((results / "runs/tiny/train/status.json").read_text())
    assert (status["state"], status["step"], status["world_size"]) == ("done", 12, 2)
    metrics = json.loads((results / "runs/tiny/evaluate/metrics.json").read_text())
    rows = metrics["datasets"]["sim"]["tasks"]["probe"]["rows"]
    assert {row["kind"] for row in rows} == {"model", "baseline"}
    assert "tiny" in (results / "report/index.html").read_text()


def test_a_second_run_has_nothing_to_do(done: tuple[Project, str]) -> None:
    again = done[0].snakemake()
    assert again.returncode == 0
    assert "Nothing to be done (all requested files are present and up to date)." in again.stdout


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ("preprocess={min_genes: 6}", EVERYTHING),
        ("vocabulary={min_cells: 2}", EVERYTHING[1:]),
        ("shard={test_frac: 0.3}", EVERYTHING[2:]),
        ("tokens={max_tokens: 32}", [*RUN, "report"]),
        ("train={lr: 5e-4}", [*RUN, "report"]),
        ("train={lr: 1e-3}", []),  # the same value in another notation
        ("consolidate={checkpoint: last}", [*RUN[2:], "report"]),
        ("embed={token_budget: 999}", ["embed", "evaluate", "report"]),
        ("evaluate={folds: 4}", ["evaluate", "report"]),
        ("report={title: Ours}", ["report"]),
    ],
)
def test_a_changed_key_reruns_the_stages_that_read_it_and_those_after_them(
    done: tuple[Project, str], change: str, rules: list[str]
) -> None:
    assert done[0].jobs("--config", change) == dict.fromkeys(rules, 1)


def test_a_changed_profile_reruns_nothing(done: tuple[Project, str]) -> None:
    assert done[0].jobs("--set-resources", "train:nproc_per_node=1", "plan:nproc_per_node=1") == {}
    assert done[0].jobs("--set-threads", "train=1", "--cores", "1") == {}
    assert done[0].jobs(profile=None) == {}


def test_an_added_run_does_not_rerun_the_first(done: tuple[Project, str]) -> None:
    runs = "runs={tiny: {corpus: sim}, tuned: {corpus: sim, init_from: tiny, train: {lr: 1e-4}}}"
    assert done[0].jobs("--config", runs) == dict.fromkeys([*RUN, "report"], 1)


def test_the_report_of_snakemake_has_the_captions(done: tuple[Project, str]) -> None:
    made = done[0].snakemake("--report", "snakemake.html")
    assert made.returncode == 0, made.stdout
    page = done[0].folder / "snakemake.html"
    text = page.read_text()
    page.unlink()
    for caption in ("Cells and genes of dataset sim before and after", "Evaluation of run tiny on held-out cells"):
        assert caption in text


def test_a_run_that_starts_from_another_waits_for_its_model(project: Project) -> None:
    config = project.write_config(
        "two.yaml", runs={"tiny": {"corpus": "sim"}, "tuned": {"corpus": "sim", "init_from": "tiny"}}
    )
    jobs = project.jobs("--configfile", config, "--", "results/runs/tuned/train/status.json")
    assert jobs == dict.fromkeys(CORPUS, 1) | {"plan": 2, "train": 2, "consolidate": 1}


def test_a_requested_file_runs_only_the_stages_it_needs(project: Project) -> None:
    made = project.snakemake("results/corpora/sim/vocabulary.tsv")
    assert made.returncode == 0, made.stdout
    results = [path for path in (project.folder / "results").rglob("*") if path.is_file()]
    names = {str(path.relative_to(project.folder)) for path in results if "benchmarks" not in path.parts}
    assert names == {*FILES["preprocess"], *FILES["vocabulary"]}


def last_lines(text: str) -> list[str]:
    """Lines of cellmill, without those of Snakemake."""
    return [
        line for line in text.splitlines() if not line.startswith(("Using profile", "Config file", "Using workflow"))
    ]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            "{shard_size: 3}",
            "run tiny: parallel.shard_size 3 does not divide 2 processes; use 2, or change",
        ),
        (
            "{pp: 2}",
            "config/config.yaml: runs.tiny: parallel.pp 2 with schedule 1F1B has 2 pipeline stages for model.layers 1",
        ),
    ],
)
def test_an_impossible_layout_is_refused_by_a_dry_run_with_the_nearest_possible(
    project: Project, parallel: str, message: str
) -> None:
    refused = project.snakemake("--dry-run", "--config", f"parallel={parallel}")
    assert refused.returncode == 1
    assert refused.stdout.splitlines()[-1].startswith(f"cellmill: {message}")
    assert "Traceback" not in refused.stdout


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        (
            "train:nproc_per_node=3",
            "run tiny: stream.lanes 4 is not a multiple of 3 processes; set 2 in the profile",
        ),
        (
            "train:nproc_per_node=0",
            "run tiny: the profile's set-resources: nproc_per_node: input should be greater than ",
        ),
        (
            "plan:nodes=2-4",
            "run tiny: the profile's set-resources: nodes: expected a number such as 2 or a range such as 1-2, ",
        ),
    ],
)
def test_impossible_processes_are_refused_by_a_dry_run(project: Project, resource: str, message: str) -> None:
    refused = project.snakemake("--dry-run", "--set-resources", resource)
    assert refused.returncode == 1
    assert refused.stdout.splitlines()[-1].startswith(f"cellmill: {message}")
    assert "Traceback" not in refused.stdout


def test_a_range_of_nodes_is_planned_and_trained(project: Project) -> None:
    elastic = ["train:nodes='1-2'", "train:launcher=slurm"]
    assert project.jobs("--set-resources", *elastic)["train"] == 1
    for stage in ("shard", "plan"):
        file = {"shard": "results/corpora/sim/shards/manifest.json", "plan": "results/runs/tiny/plan.json"}[stage]
        made = project.snakemake("--set-resources", *elastic, "--", file)
        assert made.returncode == 0, made.stdout


PROFILE = """
cores: 2
set-resources:
  plan: {device: h100}
  train: {launcher: slurm, nproc_per_node: 2, nodes: "'1-2'", slurm_partition: gpu, runtime: 30}
"""


def test_one_key_of_the_machine_changed_on_the_command_line_leaves_the_others_of_the_profile(project: Project) -> None:
    (project.folder / "machine").mkdir()
    (project.folder / "machine" / "config.yaml").write_text(PROFILE)
    dry = ["--dry-run", "--printshellcmds", "--set-resources", "train:nodes=2", "train:qos=long"]
    for given in (["--profile", "machine"], ["--workflow-profile", "machine"]):
        shown = project.snakemake(*given, *dry, profile=None).stdout
        (train,) = re.findall(r"cellmill train .*", shown)
        assert re.findall(r"--(launcher|nodes|nproc-per-node|slurm-partition|qos|runtime)=(\S*)", train) == [
            ("launcher", "slurm"),
            ("nodes", "2"),
            ("nproc-per-node", "2"),
            ("slurm-partition", "gpu"),
            ("qos", "long"),
            ("runtime", "30"),
        ]
        assert " --nodes 2 --nproc-per-node 2 --device h100 " in shown


def test_a_training_on_the_login_node_is_refused(project: Project) -> None:
    refused = project.snakemake("--executor", "slurm", "--jobs", "1", profile=None)
    assert refused.returncode == 1
    assert refused.stdout.splitlines()[-1] == (
        "cellmill: launcher local would train on this machine, although stages are jobs elsewhere (executor); set "
        "set-resources: train: launcher: slurm in the profile, or leave the executor out"
    )


def test_a_wrong_table_or_configuration_is_one_line_and_an_exit_code(project: Project) -> None:
    (project.folder / "config" / "datasets.tsv").write_text("dataset\tpth\n")
    refused = project.snakemake("--dry-run")
    assert refused.returncode == 1
    assert last_lines(refused.stdout) == ["cellmill: config/datasets.tsv: unknown column 'pth'; did you mean 'path'?"]
    refused = project.snakemake("--dry-run", "--config", "trian={lr: 1}")
    assert refused.returncode == 1
    assert last_lines(refused.stdout) == ["cellmill: config/config.yaml: unknown key 'trian'; did you mean 'train'?"]


def test_a_missing_dataset_is_named(project: Project) -> None:
    (project.folder / "data" / "sim.h5ad").unlink()
    refused = project.snakemake()
    assert refused.returncode == 1
    assert "Missing input files for rule preprocess" in refused.stdout
    assert "data/sim.h5ad" in refused.stdout


def test_a_failing_stage_prints_its_error_to_terminal_and_log_and_leaves_no_output(
    project: Project, cells: Path
) -> None:
    broken = project.folder / "data" / "sim.h5ad"
    broken.unlink()
    broken.write_bytes(cells.read_bytes()[:5000])
    failed = project.snakemake()
    assert failed.returncode == 1
    line = (project.folder / "logs" / "preprocess" / "sim.sim.log").read_text()
    assert line.startswith("cellmill preprocess: data/sim.h5ad: truncated: 5,000 of ")
    assert line.count("\n") == 1
    assert line in failed.stdout
    assert list((project.folder / "results").rglob("cells/*")) == []
