"""Benchmarks run with tiny arguments, so that a script that no longer fits the source is found."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reported import make_corpus, make_run

from cellmill.config import load_config

TINY = {
    "budget.py": "--cells 256 --repeats 1",
    "checkpoint.py index": "index --saves 1",
    "checkpoint.py stall": "stall --steps 1 --saves 2 --cells 1 --layers 1 --hidden 96",
    "checkpoint.py write": "write --saves 1 --layers 1 --hidden 96",
    "dag.py": "--runs 1 --repeats 1 --launchers 1 --seconds 1",
    "demo.py": "--repeats 1 --until shard",
    "evaluation.py": "--cells 300 --genes 300 --parts",
    "embed.py": "--cells 300 --detected 100 --repeats 1",
    "finetune.py": "{cells} --label cell_type --shots 5 --seeds 1 --epochs 1 --steps 2 --methods lora",
    "gpu.py": "--toy",
    "loader.py": "--cells 4096 --batch 16 --repeats 1",
    "prepare.py": "--cells 400 --detected 100 --repeats 1 --inputs gzip",
    "regression.py": "--repeats 1 --problems 1 --max-cells 40",
    "report.py": "{results} --runs 2",
    "scale.py": "--cells 300 --files 2 --detected 600 --families profile",
    "scaling.py": "--steps 1 --cells 1",
    "seen.py": "{cells} --million 10000",
    "step_plan.py": "--worlds 2 --cells 2 --steps 2",
    "train_step.py": "--steps 1 --threads 1 --longest 64 --device cpu",
}
"""Small arguments by script; a peer that is not installed is left out by the script itself."""


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_its_table(
    root: Path, tmp_path: Path, simulated: Path, name: str
) -> None:
    run = make_run(tmp_path / "results/runs/first")
    _ = make_corpus(tmp_path / "results/corpora/pbmc")
    (run / "train/metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "val_loss": 1.6}\n'
    )
    arguments = TINY[name].format(cells=simulated, results=tmp_path / "results").split()
    script = root / "benchmarks" / name.partition(" ")[0]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|---" in done.stdout


def test_growth_above_a_goal_is_bold(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    scale = importlib.import_module("scale")
    small = {
        scale.INPUTS: scale.Cost(cpu_s=1, wall_s=2, peak_mb=100),
        "shard": scale.Cost(cpu_s=1, wall_s=1, peak_mb=200),
        "embed": scale.Cost(cpu_s=1, wall_s=1, peak_mb=200),
    }
    large = {
        scale.INPUTS: scale.Cost(cpu_s=59, wall_s=58, peak_mb=100),
        "shard": scale.Cost(cpu_s=10, wall_s=2, peak_mb=380),
        "embed": scale.Cost(cpu_s=20, wall_s=3, peak_mb=390),
    }
    scale.print_growth({100_000: large, 10_000: small}, 8)
    assert capsys.readouterr().out.strip().splitlines() == [
        "from 10,000 to 100,000 cells, files: 8",
        "",
        "| stage | exponent | MB at a million cells |",
        "|---|---:|---:|",
        "| shard | 1.00 | **2,180** |",
        "| embed | **1.30** | **2,290** |",
        "",
        "100,000 cells: 1.5 CPU-minutes, 1.1 minutes",
        "",
        "10,000 cells: 0.1 CPU-minutes, 0.1 minutes",
    ]


TRAINING = ("genes", "leave_out", "lengths", "perturbations", "quality", "structure", "transfer")
"""Scripts that train on files of real cells, which takes hours."""


@pytest.mark.parametrize("name", TRAINING)
def test_a_benchmark_that_trains_writes_a_valid_configuration(
    root: Path, tmp_path: Path, simulated: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    script = importlib.import_module(name)
    for file in ("pbmc_donor_a", "kang_wide"):  # whose genes `genes` reads
        (tmp_path / f"{file}.h5ad").symlink_to(simulated)
    monkeypatch.chdir(tmp_path)
    given = {"folder": tmp_path, "data": tmp_path, "seeds": 1, "splits": [0], "widths": [8]}
    chosen = {key: list(getattr(script, key.upper(), ())) for key in ("datasets", "models")}
    names = inspect.signature(script.write_runs).parameters
    script.write_runs(**{key: value for key, value in (given | chosen).items() if key in names})
    assert load_config(Path("config/config.yaml")).runs
