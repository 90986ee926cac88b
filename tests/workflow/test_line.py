"""The whole workflow through Snakemake, and the rules that a change reruns."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from safetensors.numpy import load_file

from cellmill.report.collect import read_corpus, read_run
from tests.workflow.conftest import CASES, KEPT, Project, jobs_in

# all use the same finished project: .test/pretrain
pytestmark = pytest.mark.xdist_group("workflow")

CORPUS = ["preprocess", "vocabulary", "shard"]
RUN = ["plan", "train", "consolidate", "embed", "evaluate"]
EVERYTHING = [*CORPUS, *RUN, "report"]
CELLS = "results/corpora/sim/cells/sim.h5ad"
NAMES = {
    "preprocess": "sim.sim",
    "vocabulary": "sim",
    "shard": "sim",
    "embed": "tiny.sim",
    "report": "report",
}


def test_each_stage_writes_a_log_and_a_benchmark(
    done: tuple[Project, str],
) -> None:
    for stage in EVERYTHING:
        name = NAMES.get(stage, "tiny")
        assert (done[0].folder / f"results/benchmarks/{stage}/{name}.tsv").stat().st_size > 0
        log = (done[0].folder / "logs" / stage / f"{name}.log").read_text()
        assert log.strip()
        assert log in done[1]
    steps = re.findall(r"^step (\d+)/12  loss \d", done[1], re.M)
    assert (steps[0], steps[-1]) == ("1", "12")
    assert "step 12/12  validation loss " in done[1]


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
    assert {row["method"]["kind"] for row in rows} == {"model", "variant", "baseline"}
    assert "tiny" in (results / "report/index.html").read_text()


def test_every_file_with_a_command_in_the_page_is_a_target(done: tuple[Project, str]) -> None:
    run = read_run(done[0].folder / "results/runs/tiny")
    corpus = read_corpus(done[0].folder / "results/corpora/sim")
    commands = run.remake_command_by_file | corpus.remake_command_by_file
    assert len(commands) == len(CORPUS) + len(RUN)
    targets = [shlex.split(command)[-1] for command in commands.values()]
    assert done[0].jobs("--force", *targets) == dict.fromkeys([*CORPUS, *RUN], 1)


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ("preprocess={min_genes: 6}", EVERYTHING),
        pytest.param("vocabulary={min_cells: 2}", EVERYTHING[1:], marks=pytest.mark.full),
        pytest.param("shard={test_frac: 0.3}", EVERYTHING[2:], marks=pytest.mark.full),
        ("tokens={max_tokens: 32}", [*RUN, "report"]),
        ("train={lr: 5e-4}", [*RUN, "report"]),
        ("train={lr: 1e-3}", []),  # the same value in another notation
        pytest.param(
            "consolidate={checkpoint: last}", [*RUN[2:], "report"], marks=pytest.mark.full
        ),
        pytest.param(
            "embed={token_budget: 999}", ["embed", "evaluate", "report"], marks=pytest.mark.full
        ),
        ("evaluate={folds: 4}", ["evaluate", "report"]),
        pytest.param("report={title: Ours}", ["report"], marks=pytest.mark.full),
    ],
)
def test_a_changed_key_reruns_only_dependent_stages(
    done: tuple[Project, str], change: str, rules: list[str]
) -> None:
    assert done[0].jobs("--config", change) == dict.fromkeys(rules, 1)


def test_a_dry_run_names_the_options_that_changed(done: tuple[Project, str]) -> None:
    """Snakemake names only files of options, by their digests."""
    said = done[0].ran("--dry-run", "--config", "evaluate={folds: 4}", "report={title: Ours}")
    lines = [line for line in said.splitlines() if line.startswith("cellmill: ")]
    assert sorted(lines) == [
        "cellmill: evaluate of tiny: evaluate.folds 3 -> 4",
        'cellmill: report: report.title "cellmill report" -> "Ours"',
    ]


def test_a_model_is_made_again_if_its_training_failed(finished: Project) -> None:
    (finished.folder / "results/runs/tiny/train/status.json").unlink()  # as Snakemake does
    model = "results/runs/tiny/model/model.safetensors"
    assert finished.jobs("--config", "train={lr: 5e-4}", "--", model) == dict.fromkeys(RUN[:3], 1)
    assert set(RUN[:3]) <= set(finished.jobs("--config", "shard={test_frac: 0.3}", "--", model))


RUN_FOLDER = "results/runs/tiny"
PRODUCTS = {
    f"{RUN_FOLDER}/model/model.safetensors": "consolidate",
    f"{RUN_FOLDER}/model/config.json": "consolidate",
    f"{RUN_FOLDER}/model/vocabulary.tsv": "consolidate",
    f"{RUN_FOLDER}/model/README.md": "consolidate",
    f"{RUN_FOLDER}/evaluate/metrics.json": "evaluate",
    f"{RUN_FOLDER}/evaluate/umap.tsv": "evaluate",
    "results/corpora/sim/cells/sim.json": "preprocess",
}


def test_a_deleted_product_is_made_again_by_the_default_target(finished: Project) -> None:
    """Each file in turn, so that none is asked for only by chance."""
    assert finished.jobs() == {}
    for file, rule in PRODUCTS.items():
        path = finished.folder / file
        kept = path.with_name("kept aside")
        path.rename(kept)
        assert finished.jobs().get(rule) == 1, file
        kept.rename(path)


def test_a_deleted_model_is_made_again_without_a_training(finished: Project) -> None:
    weights = finished.folder / RUN_FOLDER / "model/model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    assert "train" not in finished.jobs()
    finished.ran()
    assert weights.read_bytes() == before


def test_a_changed_profile_reruns_nothing(done: tuple[Project, str], tmp_path: Path) -> None:
    assert done[0].jobs("--set-resources", "train:nproc_per_node=4", "plan:nproc_per_node=4") == {}
    assert done[0].jobs("--set-threads", "train=1", "--cores", "1") == {}
    assert done[0].jobs(profile=None) == {}
    (tmp_path / "config.yaml").write_text("cores: 2\nset-resources: {train.other: {nodes: 2}}\n")
    config = ["--config", "runs={tiny: {corpus: sim, machine: other}}"]
    assert done[0].jobs("--profile", str(tmp_path), *config, profile=None) == {}


@pytest.mark.full
def test_an_added_run_adapts_the_model_of_the_first(finished: Project) -> None:
    shutil.copy(CASES / "finetune" / "config" / "config.yaml", finished.folder / "config")
    folder = finished.folder / "results/runs/adapted"
    made = (
        "predictions/sim.h5ad",
        "knock_out/sim.h5ad",
        "map/sim.h5ad",
        "evaluate/metrics.json",
    )
    targets = [f"results/runs/adapted/{name}" for name in made]
    assert finished.jobs(*targets) == dict.fromkeys(
        [*RUN, "predict", "knock_out", "atlas", "map"], 1
    ), "nothing of the first run"
    finished.ran(*targets)
    before, after = (
        load_file(path / "model/model.safetensors") for path in (folder.with_name("tiny"), folder)
    )
    moved = {
        name
        for name in before.keys() & after.keys()
        if not np.array_equal(before[name], after[name])
    }
    assert moved == {f"blocks.0.{layer}.weight" for layer in ("qkv", "out", "up", "down")}
    assert json.loads((folder / "model/adapter/adapter_config.json").read_text())["r"] == 2
    predicted = ad.read_h5ad(folder / "predictions/sim.h5ad")
    assert {*predicted.obs["cellmill_label"].dropna()} <= {*predicted.obs["cell_type"]}
    assert predicted.n_obs == ad.read_h5ad(finished.folder / CELLS, backed="r").n_obs
    assert ad.read_h5ad(folder / "knock_out/sim.h5ad").obs_names.isin(predicted.obs_names).all()
    atlas = json.loads((folder / "model/atlas/atlas.json").read_text())
    assert (atlas["datasets"], atlas["label_columns"]) == (["sim"], ["cell_type"])
    assert atlas["n_cells"] == predicted.n_obs
    assert ad.read_h5ad(folder / "map/sim.h5ad").obs["cellmill_in_atlas"].all()
    metrics = json.loads((folder / "evaluate/metrics.json").read_text())
    assert metrics["model"]["supervised_by"] == ["cell_type"]
    assert metrics["datasets"]["sim"]["supervised"]


@pytest.mark.full
def test_a_sweep_trains_a_run_for_each_value(finished: Project) -> None:
    shutil.copy(CASES / "sweep" / "config" / "config.yaml", finished.folder / "config")
    table = "results/sweeps/size/results.csv"
    assert finished.jobs(table) == dict.fromkeys(RUN, 2) | {"sweep": 1}
    finished.ran(table)
    header, *rows = (line.split(",") for line in (finished.folder / table).read_text().splitlines())
    assert {row[header.index("model.hidden")] for row in rows} == {"8", "16"}
    assert finished.jobs(table) == {}


def test_the_report_of_snakemake_has_the_captions(done: tuple[Project, str]) -> None:
    done[0].ran("--report", "snakemake.html")
    page = done[0].folder / "snakemake.html"
    text = page.read_text()
    page.unlink()
    for caption in (
        "Cells and genes of dataset sim before and after",
        "Evaluation of run tiny on held-out cells",
    ):
        assert caption in text


def test_a_run_waits_for_the_model_it_starts_from(project: Project) -> None:
    runs = {"tiny": {"corpus": "sim"}, "tuned": {"corpus": "sim", "init_from": "tiny"}}
    config = project.write_config("tuned.yaml", runs=runs)
    dry = ["--configfile", config, "--dry-run", "--"]
    assert jobs_in(project.ran(*dry, "results/runs/tuned/train/status.json")) == (
        dict.fromkeys(CORPUS, 1) | {"plan": 2, "train": 2, "consolidate": 1}
    )


def test_a_branch_waits_for_its_trunk(project: Project) -> None:
    runs = {"tiny": TRUNK, "short": BRANCH}
    config = project.write_config("branch.yaml", runs=runs)
    status = "results/runs/short/train/status.json"
    dry = ["--configfile", config, "--dry-run", "--printshellcmds", "--"]
    shown = project.ran(*dry, status)
    assert jobs_in(shown) == dict.fromkeys(CORPUS, 1) | {"plan": 2, "train": 2}
    assert "--trunk results/runs/tiny/train/checkpoints/step-00000004" in shown


@pytest.mark.full
def test_kept_checkpoints_are_evaluated_without_training_again(finished: Project) -> None:
    config = finished.write_config(
        "kept.yaml", runs={"tiny": {"corpus": "sim", "evaluate_steps": KEPT}}
    )
    kept = dict.fromkeys(["consolidate", "embed", "evaluate"], 2) | {"report": 1}
    assert finished.jobs("--configfile", config) == kept
    finished.ran("--configfile", config)
    results = finished.folder / "results"
    for step in KEPT:
        metrics = json.loads(
            (results / f"runs/tiny/steps/{step}/evaluate/metrics.json").read_text()
        )
        assert metrics["model"]["step"] == step
    assert "probe: accuracy over steps" in (results / "report/index.html").read_text()


def test_the_file_of_gene_vectors_is_an_input_of_the_training(project: Project) -> None:
    vectors = {"gene_vectors": "vectors.npy", "gene_vector_dim": 4}
    config = project.write_config("vectors.yaml", model=vectors)
    asked = ("--configfile", config, "--", "results/runs/tiny/train/status.json")
    (project.folder / "vectors.npy").write_text("content")
    assert project.jobs(*asked) == dict.fromkeys([*CORPUS, "plan", "train"], 1)


def student(teacher: str) -> dict[str, Any]:
    """A run that learns from a teacher beside its own objective."""
    objective = {"name": "sum", "parts": {"cell_decoding": {}, "distill": {"teacher": teacher}}}
    return {
        "corpus": "sim",
        "model": {"family": "profile", "hidden": 16, "layers": 1},
        "objective": objective,
    }


def test_a_student_waits_for_the_embeddings_of_its_teacher(
    project: Project,
) -> None:
    runs = {"tiny": {"corpus": "sim"}, "student": student("tiny")}
    config = project.write_config("student.yaml", runs=runs)
    asked = ("--configfile", config, "--", "results/runs/student/train/status.json")
    once = dict.fromkeys([*CORPUS, "consolidate", "embed", "teach"], 1)
    shown = project.ran("--dry-run", "--printshellcmds", *asked)
    assert jobs_in(shown) == once | {"plan": 2, "train": 2}
    assert "--embeddings results/runs/tiny/embeddings/sim.h5ad --out " in shown
    assert "--teacher results/runs/student/teacher " in shown


def test_a_student_may_read_a_folder_of_embeddings(project: Project) -> None:
    config = project.write_config("student.yaml", runs={"student": student("./given")})
    (project.folder / "given").mkdir()
    (project.folder / "given" / "sim.h5ad").write_text("content")
    target = "results/runs/student/train/status.json"
    assert project.jobs("--configfile", config, "--", target) == (
        dict.fromkeys([*CORPUS, "teach", "plan", "train"], 1)
    )


@pytest.mark.full
def test_a_student_is_named_after_its_teacher(finished: Project) -> None:
    labels = {"name": "classification", "label_column": "cell_type"}
    teacher = {"corpus": "sim", "objective": labels, "init_from": "tiny"}
    runs = {"tiny": {"corpus": "sim"}, "teacher": teacher, "student": student("teacher")}
    config = finished.write_config("student.yaml", runs=runs)
    asked = ("--configfile", config, "--", "results/runs/student/evaluate/metrics.json")
    shown = finished.ran("--printshellcmds", *asked)
    ancestors = re.search(
        r"cellmill evaluate .*runs/student/.* --ancestors (\S+ \S+) --cells", shown
    )
    assert ancestors is not None, (
        "the cells of its teacher, and of that which its teacher began with"
    )
    folder = finished.folder / "results/runs/student"
    assert "training cells have a vector of 16 numbers" in shown
    config = json.loads((folder / "model/config.json").read_text())
    assert config["supervised_by"] == ["cell_type"]
    digest = json.loads((folder.with_name("teacher") / "model/config.json").read_text())[
        "weights_sha256"
    ]
    assert (
        f"| distilled from | teacher, weights `{digest[:16]}` |"
        in (folder / "model/README.md").read_text()
    )
    logged = [
        json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()
    ]
    assert min(line["labelled_frac_distill"] for line in logged if "loss" in line) > 0.9
    assert finished.jobs(*asked) == {}
    embeddings = folder.with_name("teacher") / "embeddings/sim.h5ad"
    changed = ad.read_h5ad(embeddings)
    changed.obsm["X_cellmill"] = changed.obsm["X_cellmill"][:, ::-1].copy()
    changed.write_h5ad(embeddings)
    assert {"teach", "train", "consolidate"} <= set(finished.jobs(*asked))
    again = finished.snakemake(*asked)
    assert again.returncode != 0
    assert (
        "it holds a training of 12 steps with another configuration (objective.parts {"
        in again.stdout
    )


def test_shards_are_written_by_the_requested_number_of_jobs(project: Project) -> None:
    jobs = project.jobs("results/corpora/sim/shards/manifest.json", "--config", "shard={jobs: 3}")
    assert jobs == dict.fromkeys([*CORPUS, "divide"], 1) | {"shard_part": 3}


def test_a_run_may_start_from_a_model_folder(
    project: Project,
) -> None:
    (project.folder / "given").mkdir()
    (project.folder / "given" / "model.safetensors").write_text("content")
    shared = {"corpus": "sim", "objective": {"name": "classification", "label_column": "cell_type"}}
    runs = {
        "tuned": shared | {"init_from": "./given"},
        "hub": shared | {"init_from": "hf://me/pbmc@v1.0"},
    }
    config = project.write_config("given.yaml", runs=runs)
    targets = [f"results/runs/{run}/predictions/sim.h5ad" for run in runs]
    shown = project.ran("--dry-run", "--printshellcmds", "--configfile", config, "--", *targets)
    expected = dict.fromkeys(["plan", "train", "consolidate", "predict"], 2)
    assert jobs_in(shown) == dict.fromkeys([*CORPUS, "pull"], 1) | expected
    assert "cellmill pull me/pbmc@v1.0 --out results/hub/me/pbmc@v1.0 " in shown
    starts = dict(re.findall(r"cellmill train .* --out .*runs/(\w+)/.* --init-from (\S+)", shown))
    assert starts == {"tuned": "given", "hub": "results/hub/me/pbmc@v1.0"}


@pytest.mark.full
def test_a_bridge_is_made_on_request_after_the_evaluation(project: Project) -> None:
    for package in ("scib-metrics", "cz-benchmarks"):
        target = f"results/runs/tiny/bridges/sim.{package}.json"
        stages = [*CORPUS, *RUN, "unpack", package.replace("-", "_")]
        assert project.jobs(target) == dict.fromkeys(stages, 1)
    target = "results/runs/tiny/bridges/sim.scib-metrics.json"
    shown = project.snakemake("-n", "-p", target).stdout
    assert re.search(
        r"Shell command: python \S+/workflow/bridges/scib_bridge\.py --cells results/corpora/sim/unpacked/sim\.h5ad "
        r"--embedding results/runs/tiny/embeddings/sim\.h5ad --metrics results/runs/tiny/evaluate/metrics\.json "
        r"--umap results/runs/tiny/evaluate/umap\.tsv --label cell_type --out " + re.escape(target),
        shown,
    )
    (project.folder / "python").write_text("#!/bin/sh\n")
    shown = project.snakemake(
        "-n", "-p", target, "--config", "bridges={scib-metrics: ./python}"
    ).stdout
    assert "Shell command: ./python /" in shown
    config = project.write_config("none.yaml", evaluate={"datasets": []})
    refused = project.snakemake("-n", "--configfile", config, "--", target).stdout
    assert "run tiny is not evaluated on dataset 'sim'" in refused


def test_predicted_changes_need_no_evaluation(project: Project) -> None:
    targets = {
        name: f"results/runs/tiny/bridges/sim.{name}.json" for name in ("cell-eval", "cell-eval2")
    }
    expected = [
        *CORPUS,
        "plan",
        "train",
        "consolidate",
        "embed",
        "predict_changes",
        "cell_eval",
        "cell_eval2",
    ]
    assert project.jobs(*targets.values()) == dict.fromkeys(expected, 1)
    shown = project.snakemake("-n", "-p", *targets.values()).stdout
    assert re.search(r"cellmill predict_changes .* --labels cell_type --out", shown)
    for name, script in zip(targets, ("cell_bridge", "cell2_bridge")):
        assert re.search(
            rf"Shell command: python \S+/workflow/bridges/{script}\.py --changes results/runs/tiny/changes/sim\.h5ad "
            r"--threads 2 --out " + re.escape(targets[name]),
            shown,
        )


EXTERNAL = """
import sys
import anndata as ad
import numpy as np
cells = ad.read_h5ad(sys.argv[1])
profiles = np.log1p(cells.X.toarray().astype(float))
u, s, _ = np.linalg.svd(profiles - profiles.mean(0), full_matrices=False)
print("components of", cells.n_obs)
ad.AnnData(obs=cells.obs[[]], obsm={"X_emb": (u * s)[:, :5]}).write_h5ad(sys.argv[2])
"""


@pytest.mark.full
def test_an_external_model_runs_once_per_corpus(
    finished: Project,
) -> None:
    script = finished.folder / "embed it.py"
    script.write_text(EXTERNAL)
    external = {
        "pca": {
            "command": f"{sys.executable} 'embed it.py' {{cells}} {{out}}",
            "files": ["embed it.py"],
        }
    }
    tasks = {
        "tasks": {"probe": {"neighbors": 5, "seeds": 1}, "few_shot": {"shots": [5], "draws": 2}}
    }
    runs = {"tiny": {"corpus": "sim"}, "other": {"corpus": "sim", "train": {"seed": 1}}}
    both = finished.write_config("both.yaml", runs=runs, evaluate=tasks | {"external": external})
    targets = [f"results/runs/{run}/evaluate/metrics.json" for run in runs]
    # the run `tiny` is done
    expected = dict.fromkeys(RUN, 1) | {"embed_external": 1, "evaluate": 2}
    assert finished.jobs("--configfile", both, "--", *targets) == expected
    config = finished.write_config("external.yaml", evaluate=tasks | {"external": external})
    asked = ("--configfile", config, "--", targets[0])
    finished.ran(*asked)
    [log] = (finished.folder / "logs/embed_external").iterdir()
    assert re.fullmatch(r"sim\.pca\.sim-[0-9a-f]{12}\.log", log.name)
    of_tasks = json.loads((finished.folder / targets[0]).read_text())["datasets"]["sim"]
    assert f"components of {of_tasks['n_cells']}\n" in log.read_text()
    for task in ("probe", "few_shot"):
        names = [
            row["name"]
            for row in of_tasks["tasks"][task]["rows"]
            if row["method"]["kind"] == "external"
        ]
        assert "external: pca + kNN" in names
    assert finished.jobs(*asked) == {}
    script.write_text("another")
    assert finished.jobs(*asked) == {"embed_external": 1, "evaluate": 1}
    script.unlink()
    refused = finished.snakemake("-n", *asked).stdout
    assert "cellmill: evaluate.external.pca.files: embed it.py: no such file" in refused


def refusal(project: Project, *words: str, profile: str | None = "profiles/local") -> str:
    """What cellmill says, without lines of Snakemake, where a command is refused."""
    refused = project.snakemake(*words, profile=profile)
    assert refused.returncode == 1
    own = ("Using profile", "Config file", "Using workflow")
    return "\n".join(line for line in refused.stdout.splitlines() if not line.startswith(own))


TRUNK = {"corpus": "sim", "train": {"schedule": "wsd", "keep_steps": [4]}}
BRANCH = {
    "corpus": "sim",
    "trunk": "tiny",
    "trunk_step": 4,
    "train": {"schedule": "wsd", "steps": 6},
}


@pytest.mark.parametrize(
    ("sections", "words", "message"),
    [
        ({}, "--config|parallel={shard_size: 3}|--set-resources|train:nproc_per_node=2",
         "run tiny: parallel.shard_size 3 does not divide 2 processes; use 2, or change"),
        ({}, "--set-resources|train:nproc_per_node=0",
         "run tiny: the profile's set-resources: nproc_per_node: input should be greater than "),
        ({}, "--set-resources|plan:nodes=2-4",
         "run tiny: the profile's set-resources: nodes: expected a number such as 2 or a range such as 1-2, "),
        ({"model": {"gene_vectors": "vectors.npy", "gene_vector_dim": 4}}, "",
         "model.gene_vectors: vectors.npy: no such file"),
        ({"runs": {"tiny": student("./given")}}, "", "runs.tiny.objective.teacher: given/sim.h5ad: no such file"),
        ({"runs": {"tiny": TRUNK, "short": BRANCH | {"trunk_step": 5}}}, "",
         "config/config.yaml: runs.short.trunk_step: 5 is not in train.keep_steps of tiny ([4]); add it there"),
        ({"runs": {"tiny": {"corpus": "sim", "evaluate_steps": [5]}}}, "",
         "config/config.yaml: runs.tiny: evaluate_steps: 5 is not in train.keep_steps; add it there"),
        ({}, "--config|bridges={scib_metrics: ./python}",
         "config/config.yaml + --config: bridges: no bridge 'scib_metrics'; did you mean 'scib-metrics'?"),
        ({}, "--config|restart=tny", "restart: no run 'tny'; there are: tiny"),
        ({}, "results/runs/tny/plan.json", "results/runs/tny/plan.json: no run 'tny'; did you mean 'tiny'?"),
        ({}, "results/corpora/si/cells/sim.h5ad", "results/corpora/si/cells/sim.h5ad: no corpus 'si'; did you mean "),
        ({}, "--config|private=mine", "config/config.yaml + --config: private: "),
    ],
)  # fmt: skip
def test_impossible_runs_are_refused_by_a_dry_run(
    project: Project, sections: dict[str, Any], words: str, message: str
) -> None:
    project.write_config(**sections)
    said = refusal(project, "--dry-run", *filter(None, words.split("|")))
    assert said.splitlines()[-1].startswith(f"cellmill: {message}")
    assert "Traceback" not in said


def test_a_training_on_the_login_node_is_refused(project: Project) -> None:
    said = refusal(project, "--executor", "slurm", "--jobs", "1", profile=None)
    assert said.splitlines()[-1] == (
        "cellmill: launcher local would train on this machine, although stages are jobs elsewhere (executor); set "
        "set-resources: train: launcher: slurm in the profile, or leave the executor out"
    )


def test_a_wrong_table_ends_with_an_exit_code(project: Project) -> None:
    (project.folder / "other.yaml").write_text("trian: {lr: 1}\n")
    other = ["--configfile", "other.yaml", "--replace-workflow-config"]
    for source, words in (
        ("config/config.yaml + --config", ["--config", "trian={lr: 1}"]),
        ("other.yaml", other),
    ):
        said = refusal(project, "--dry-run", *words)
        assert said == f"cellmill: {source}: unknown key 'trian'; did you mean 'train'?"
    (project.folder / "config" / "datasets.tsv").write_text("dataset\tpth\n")
    said = refusal(project, "--dry-run")
    assert said == "cellmill: config/datasets.tsv: unknown column 'pth'; did you mean 'path'?"
    (project.folder / "config" / "datasets.tsv").write_text("dataset\tpath\nsim\tdata/none.h5ad\n")
    said = refusal(project, "--dry-run")
    assert said.startswith(
        "cellmill: config/datasets.tsv: dataset sim: data/none.h5ad: no such file; correct the path"
    )
    (project.folder / "config" / "datasets.tsv").write_text(f"dataset\tpath\nsim\t{'a' * 300}\n")
    assert refusal(project, "--dry-run") == f"cellmill: {'a' * 300}: File name too long"


def test_a_missing_file_is_named_even_if_its_output_exists(project: Project) -> None:
    """Snakemake would take the vocabulary as it is, and say that nothing is to be done."""
    vocabulary = project.folder / "results" / "corpora" / "sim" / "vocabulary.tsv"
    vocabulary.parent.mkdir(parents=True)
    vocabulary.touch()
    project.write_config(vocabulary={"genes": "nope.txt"})
    said = refusal(project, "--dry-run", str(vocabulary.relative_to(project.folder)))
    assert said == "cellmill: vocabulary.genes: nope.txt: no such file"


def test_columns_of_the_table_reach_the_stage(
    project: Project,
) -> None:
    table = project.folder / "config" / "datasets.tsv"
    names = project.folder / "names.tsv"
    header = "dataset\tpath\tlabel\tlabel_map\tfilter\tdonor\tmin_genes\tcounts_rule\n"
    row = (
        'sim\tdata/sim.h5ad\tcell_type|batch\tnames.tsv|\tbatch != "it\'s" and cell_type '
        "in ['{}']\tbatch\t{}\tround\n"
    )
    kind = ad.read_h5ad(project.folder / "data" / "sim.h5ad", backed="r").obs["cell_type"].iloc[0]
    names.write_text(f"from\tto\n{kind}\tof this type\n")
    table.write_text(header + row.format(kind, 7))
    project.ran(CELLS)
    obs = ad.read_h5ad(project.folder / CELLS).obs
    assert set(obs["cell_type"]) == {"of this type"}
    assert (obs["donor"] == obs["batch"]).all()
    report = json.loads((project.folder / CELLS).with_suffix(".json").read_text())
    assert report["options"]["min_genes"] == 7
    assert report["source"]["columns"]["filter"] == f"batch != \"it's\" and cell_type in ['{kind}']"
    assert project.jobs(CELLS) == {}
    table.write_text(header + row.format(kind, 8))
    assert project.jobs(CELLS) == {"preprocess": 1}
    table.write_text(header + row.format(kind, 7))
    names.write_text(f"from\tto\n{kind}\tof another type\n")
    assert project.jobs(CELLS) == {"preprocess": 1}
    table.write_text(header + row.replace("batch !=", "bach !=").format(kind, 7))
    assert refusal(project, "--dry-run") == (
        "cellmill: config/datasets.tsv: dataset sim: data/sim.h5ad has no obs column 'bach' (filter); did you mean "
        "'batch'?"
    )


def test_yaml_that_snakemake_cannot_read_is_one_line(project: Project) -> None:
    config = project.folder / "config" / "config.yaml"
    text = config.read_text()
    config.write_text(f"{text}\ntokens: {'[' * 10_000}\n")
    assert (
        refusal(project, "--dry-run")
        == "cellmill: config/config.yaml: not valid YAML: nested too deeply"
    )
    config.unlink()
    os.mkfifo(config)
    assert (
        refusal(project, "--dry-run") == "cellmill: config/config.yaml: expected a file, got a FIFO"
    )
    config.unlink()
    config.write_text(text)
    (project.folder / "results").mkdir(exist_ok=True)
    (project.folder / "results" / "options").write_text(
        "in the place of the folder, as on a read-only disk"
    )
    said = refusal(project)
    remedy = "the workflow writes to its working directory"
    assert said.splitlines()[-1] == f"cellmill: results/options/report: Not a directory; {remedy}"


def test_a_failing_stage_leaves_no_output(project: Project, cells: Path) -> None:
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


MACHINES = """
cores: 2
set-resources:
  embed: {runtime: 17, constraint: big}
  plan: {device: a100}
  train: {launcher: slurm, nproc_per_node: 2, nodes: 2, slurm_partition: gpu-a, gpus_per_node: "a100:2", mem_mb: 9000}
  train.h100: {slurm_partition: gpu-b, nodes: "'1-2'", gres: "gpu:h100:2", qos: long}
  plan.h100: {device: h100}
"""


def flags_by_run(printed: str) -> dict[str, str]:
    """Flags of the machine of `cellmill train` that are not defaults, and those of `cellmill plan`."""
    trained = re.findall(r"cellmill train (.*)runs/(\w+)/train/status.json(.*)", printed)
    planned = dict(re.findall(r"--out results/runs/(\w+)/plan.json (.*?) 2>&1", printed))
    flags = {run: re.findall(r"--([a-z-]+=\S+)", before + after) for before, run, after in trained}
    return {run: f"{' '.join(flags[run])} plan {planned[run]}" for run in flags}


def test_a_command_changes_single_keys_of_a_machine(project: Project) -> None:
    (project.folder / "machine").mkdir()
    (project.folder / "machine" / "config.yaml").write_text(MACHINES)
    project.write_config(
        runs={"tiny": {"corpus": "sim"}, "big": {"corpus": "sim", "machine": "h100"}}
    )
    dry = ["--dry-run", "--printshellcmds"]
    assert flags_by_run(project.ran("--profile", "machine", *dry, profile=None)) == {
        "tiny": "launcher=slurm nodes=2 nproc-per-node=2 slurm-partition=gpu-a gpus-per-node=a100:2 mem-mb=9000 "
        "plan --nodes 2 --nproc-per-node 2 --mem-mb 9000 --device a100",
        "big": "launcher=slurm nodes=1-2 nproc-per-node=2 slurm-partition=gpu-b qos=long gres=gpu:h100:2 mem-mb=9000 "
        "plan --nodes 1-2 --nproc-per-node 2 --mem-mb 9000 --device h100",
    }
    # what the command sets for train holds for all; one machine is changed by its name
    typed = [
        "--set-resources",
        "train:nodes=1",
        "train.h100:slurm_partition=new",
        "embed:runtime=19",
    ]
    for given in ("--profile", "--workflow-profile"):
        shown = project.ran(given, "machine", *dry, *typed, profile=None)
        assert flags_by_run(shown) == {
            "tiny": "launcher=slurm nproc-per-node=2 slurm-partition=gpu-a gpus-per-node=a100:2 mem-mb=9000 "
            "plan --nodes 1 --nproc-per-node 2 --mem-mb 9000 --device a100",
            "big": "launcher=slurm nproc-per-node=2 slurm-partition=new qos=long gres=gpu:h100:2 mem-mb=9000 "
            "plan --nodes 1 --nproc-per-node 2 --mem-mb 9000 --device h100",
        }
        assert re.search(r"^ +resources: .*runtime=19,.* constraint=big", shown, re.M)
    project.write_config(runs={"tiny": {"corpus": "sim", "machine": "h10"}})
    said = refusal(project, "--profile", "machine", *dry, profile=None)
    assert said.splitlines()[-1] == (
        "cellmill: run tiny: no machine 'h10' in machine/config.yaml; did you mean 'h100'?"
    )


def test_a_profile_counts_the_size_of_a_copied_url(project: Project) -> None:
    table = project.folder / "config" / "datasets.tsv"
    table.write_text("dataset\tpath\nsim\thttps://example.org/cells.h5ad\n")
    record = project.folder / "results/corpora/sim/inputs/sim.fetched.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"bytes": 1000 * 2**20}))
    profile = project.folder / "profiles" / "site" / "config.yaml"
    profile.parent.mkdir(parents=True)
    request = "min(int(8000 + input.size_mb / 5) * attempt, {})"
    for limit, expected in ((190_000, 8200), (8100, 8100)):
        text = f"cores: 2\nset-resources: {{preprocess: {{mem_mb: '{request.format(limit)}'}}}}\n"
        profile.write_text(text)
        shown = project.ran(
            "--dry-run", "results/corpora/sim/cells/sim.json", profile=str(profile.parent)
        )
        assert f" mem_mb={expected}," in shown


def test_a_profile_is_found_from_where_a_command_is_typed(project: Project) -> None:
    here = Project(project.folder.with_name("elsewhere"))
    (here.folder / "profiles" / "machine").mkdir(parents=True)
    (here.folder / "profiles" / "machine" / "config.yaml").write_text(MACHINES)
    words = ["--directory", str(project.folder), "--dry-run", "--printshellcmds"]
    rest = "slurm-partition=gpu-a gpus-per-node=a100:2 mem-mb=9000 plan --nodes"
    for given in (["--profile", "profiles/machine"], ["--workflow-profile", "machine"]):
        assert flags_by_run(here.ran(*given, *words, profile=None)) == {
            "tiny": f"launcher=slurm nodes=2 nproc-per-node=2 {rest} 2 --nproc-per-node 2 --mem-mb 9000 --device a100"
        }
        typed = here.ran(*given, *words, "--set-resources", "train:nodes=1", profile=None)
        assert flags_by_run(typed) == {
            "tiny": f"launcher=slurm nproc-per-node=2 {rest} 1 --nproc-per-node 2 --mem-mb 9000 --device a100"
        }


@pytest.mark.full
def test_a_failed_stage_prints_a_command_to_run_again(project: Project) -> None:
    vocabulary = "results/corpora/sim/vocabulary.tsv"
    failed = project.snakemake(vocabulary, "--config", "preprocess={min_genes: 149}")
    assert failed.returncode == 1
    (command,) = re.findall(r"^ +(cellmill preprocess .*) 2>&1 \| tee", failed.stdout, re.M)
    assert len(command) < 400
    assert max(len(line) for line in failed.stdout.splitlines()) < 600, (
        "the other places that print it"
    )
    words = [str(Path(sys.executable).with_name("cellmill")), *shlex.split(command)[1:]]
    again = subprocess.run(words, cwd=project.folder, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr in failed.stdout
    # options are still a reason to rerun, and another configuration is another file
    project.ran(vocabulary)
    assert len(list((project.folder / "results/options/preprocess").glob("sim.*.json"))) == 2
    assert "preprocess" in project.jobs(vocabulary, "--config", "preprocess={min_genes: 6}")
    assert len(list((project.folder / "results/options/preprocess").glob("sim.*.json"))) == 2, (
        "by a dry run"
    )


@pytest.mark.full
def test_a_private_workflow_writes_only_for_its_user(project: Project) -> None:
    project.ran(CELLS, "--config", "private=true")
    written = [path for top in ("results", "logs") for path in (project.folder / top).rglob("*")]
    assert project.folder / CELLS in written
    assert {path.stat().st_mode & 0o077 for path in written} == {0}
    assert project.jobs(CELLS) == {}


def test_a_vocabulary_of_training_cells_follows_the_split(
    project: Project,
) -> None:
    vocabulary = "results/corpora/sim/vocabulary.tsv"
    held_out = {"split_by": "cell_type", "val_frac": 0.3, "test_frac": 0.3}
    project.write_config(shard=held_out)
    project.ran(vocabulary)
    [line] = [
        line
        for line in (project.folder / vocabulary).read_text().splitlines()
        if line.startswith("#training_cells")
    ]
    _, n_training, n_all, column = line.split("\t")
    assert 0 < int(n_training) < int(n_all) <= 240
    assert column == "cell_type"
    assert (
        f"genes and medians are those of {int(n_training)} training cells"
        in (project.folder / "logs" / "vocabulary" / "sim.log").read_text()
    )
    project.write_config(shard=held_out | {"cells_per_shard": 64, "duplicates": "drop"})
    assert project.jobs(vocabulary) == {}
    project.write_config(shard=held_out | {"seed": 3})
    assert project.jobs(vocabulary) == {"vocabulary": 1}
