"""Seconds of a dry run of 1, 10, 100 and 400 runs, and the cost of a launcher that waits.

    python benchmarks/dag.py [--runs 1 10 100 400] [--launchers 20]

The first table is `snakemake -n` on a configuration of so many runs of one corpus: parsing, the
graph, and scheduling every job of it, dry. Its last column is Snakemake's part: the same jobs and
files by rules without options, checks or resources, run in turn with it. The second table starts
launchers of a training that a scripted SLURM says is running: memory of each, CPU time it takes,
and how often squeue was asked by all of them together. `--launchers 0` leaves it out.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from cellmill.cli import main as cellmill

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 5
OPTIONS = {
    "tokens": {"max_tokens": 64},
    "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
    "model": {"family": "encoder", "hidden": 16, "layers": 1, "heads": 2},
    "parallel": {},
    "train": {"steps": 10, "global_batch": 16, "token_budget": 2048},
}

MODEL = [
    f"model/{name}" for name in ("model.safetensors", "config.json", "vocabulary.tsv", "README.md")
]
EVALUATED = ["evaluate/metrics.json", "evaluate/umap.tsv"]
SHARDS = "results/c/shards/manifest.json"
VOCABULARY = "results/c/vocabulary.tsv"
CELLS = "results/c/cells/d.h5ad"
RUN_RULES = {
    "plan": ([SHARDS], ["plan.json"]),
    "train": ([SHARDS, VOCABULARY, "plan.json"], ["train/status.json"]),
    "consolidate": (["train/status.json", VOCABULARY, SHARDS], MODEL),
    "embed": ([*MODEL[:3], CELLS], ["embeddings/d.h5ad"]),
    "evaluate": ([MODEL[0], SHARDS, CELLS, "embeddings/d.h5ad"], EVALUATED),
}
"""Inputs and outputs of the rules of a run; those without results/ are in its folder."""
CORPUS_RULES = {
    "demo_data": ([], ["raw.h5ad"]),
    "preprocess": (["raw.h5ad"], [CELLS, "results/c/cells/d.json"]),
    "vocabulary": ([CELLS], [VOCABULARY]),
    "shard": ([CELLS, VOCABULARY], [SHARDS]),
}


def plain_project(folder: Path, runs: int) -> None:
    """A Snakefile with the jobs and files of `project`, and nothing else."""
    names = [f"run{n:03}" for n in range(runs)]
    files = ["plan.json", "train/status.json", *MODEL, *EVALUATED]
    reported = [f"results/runs/{name}/{file}" for name in names for file in files]
    reported += ["results/c/cells/d.json", SHARDS]
    rules = [("all", ["results/report.html", *reported], [], "")]
    rules.append(("report", reported, ["results/report.html"], "report"))
    rules += [(name, *files, name) for name, files in CORPUS_RULES.items()]
    for name, files in RUN_RULES.items():
        of_run = [
            [
                file if file.startswith("results") else f"results/runs/{{run}}/{file}"
                for file in kind
            ]
            for kind in files
        ]
        rules.append((name, *of_run, f"{name}/{{run}}"))
    text = f"wildcard_constraints:\n    run={'|'.join(names)!r}\n"
    for name, inputs, outputs, log in rules:
        text += f"rule {name}:\n    input: {inputs}\n    output: {outputs}\n"
        if log:
            text += f"    log: 'logs/{log}.log'\n    benchmark: 'benchmarks/{log}.tsv'\n    shell: 'true'\n"
    folder.mkdir(parents=True)
    (folder / "Snakefile").write_text(text)


def project(folder: Path, runs: int) -> None:
    """A configuration of `runs` runs that differ in their learning rate."""
    (folder / "config").mkdir(parents=True)
    tree = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    corpus = next(iter(tree["corpora"]))
    tree["runs"] = {
        f"run{n:03}": {"corpus": corpus, "train": {"lr": 1e-4 * (n + 1)}} for n in range(runs)
    }
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.copy(ROOT / "config" / "datasets.tsv", folder / "config")


def dry_run(folder: Path, runs: int, repeats: int) -> str:
    """A row of the table: medians of wall and CPU seconds, the peak of memory, and Snakemake's part."""
    project(folder / "ours", runs)
    plain_project(folder / "plain", runs)
    snakefiles = {"ours": ROOT / "Snakefile", "plain": folder / "plain" / "Snakefile"}
    walls: dict[str, list[float]] = {kind: [] for kind in snakefiles}
    cpus: dict[str, list[float]] = {kind: [] for kind in snakefiles}
    peak = 0.0
    for _ in range(repeats):
        for kind, snakefile in snakefiles.items():
            command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules"]
            command += ["--snakefile", str(snakefile)]
            command += ["--profile", str(ROOT / "profiles" / "slurm")]
            began = time.perf_counter()
            with subprocess.Popen(
                command,
                cwd=folder / kind,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as process:
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                sys.exit(f"{' '.join(command)} failed in {folder / kind}")
            walls[kind].append(time.perf_counter() - began)
            cpus[kind].append(used.ru_utime + used.ru_stime)
            if kind == "ours":
                peak = max(peak, used.ru_maxrss / 1024)
    wall = statistics.median(walls["ours"])
    cpu, plain_cpu = (statistics.median(cpus[kind]) for kind in ("ours", "plain"))
    lowest = min(cpus["ours"])
    highest = max(cpus["ours"])
    return (
        f"| {runs} | {6 + 5 * runs} | {wall:.1f} | {cpu:.1f} ({lowest:.1f} to {highest:.1f}) | {peak:.0f} | "
        f"{plain_cpu:.1f} |"
    )


def corpus(folder: Path) -> None:
    """Vocabulary and shards of 120 simulated cells."""
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "corpora": {"sim": {"table": str(folder / "datasets.tsv")}},
                "preprocess": {"min_genes": 5, "min_cells": 1},
                "train": {"steps": 1},
                "runs": {"sim": {"corpus": "sim"}},
            }
        )
    )
    shared = ["--config", str(folder / "config.yaml"), "--corpus", "sim"]
    raw = str(folder / "raw.h5ad")
    cells = str(folder / "cells.h5ad")
    preprocess = ["preprocess", *shared, "--input", raw, "--dataset", "sim"]
    vocabulary = f"{folder}/vocabulary.tsv"
    shard = ["shard", *shared, "--cells", cells, "--vocabulary", vocabulary]
    commands = (
        ["simulate", "--out", raw, "--cells", "120", "--genes", "100"],
        [*preprocess, "--out", cells, "--report", f"{folder}/sim.json"],
        ["vocabulary", *shared, "--cells", cells, "--out", vocabulary],
        [*shard, "--out", f"{folder}/shards/manifest.json"],
    )
    for words in commands:
        if cellmill(words):
            sys.exit(f"cellmill {words[0]} failed")


def fake_slurm(folder: Path, launchers: int) -> dict[str, str]:
    """Environment with a scripted SLURM in `folder` in which every job runs for ever."""
    (folder / "bin").mkdir(parents=True)
    for name in ("sbatch", "squeue", "sacct", "scancel", "srun"):
        shutil.copy(ROOT / "tests" / "unit" / "fake_slurm.py", folder / "bin" / name)
        (folder / "bin" / name).chmod(0o755)
    jobs = "".join(f"{n}|RUNNING|None|node1||{{name {n}}}\n" for n in range(1, launchers + 1))
    answers = {
        "squeue": [[0, jobs, ""]],
        "sbatch": [[0, f"Submitted batch job {n}\n", ""] for n in range(1, launchers + 1)],
        "scancel": [[0, "", ""]],
    }
    (folder / "answers.json").write_text(json.dumps(answers))
    return os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "FAKE_SLURM": str(folder),
        "TMPDIR": str(folder.parent),
    }


def start_launcher(folder: Path, train: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start `cellmill train` on the corpus in `folder`; it waits for its job in the fake SLURM."""
    command = [sys.executable, "-m", "cellmill.cli", "train", "--launcher", "slurm"]
    command += ["--options", json.dumps(OPTIONS), f"--poll-s={POLL_S}"]
    command += ["--manifest", f"{folder}/shards/manifest.json"]
    command += ["--vocabulary", f"{folder}/vocabulary.tsv", "--out", str(train)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of the process so far."""
    times = process.cpu_times()
    return times.user + times.system


def waiting(folder: Path, launchers: int, seconds: float) -> str:
    """A row of the second table."""
    corpus(folder)
    fake = folder / "fake"
    environment = fake_slurm(fake, launchers)
    trains = [folder / "runs" / str(n) / "train" for n in range(launchers)]
    processes = [start_launcher(folder, train, environment) for train in trains]
    records = [train / "jobs" / "001" / "job.json" for train in trains]
    while not all(record.exists() for record in records):
        if any(process.poll() is not None for process in processes):
            sys.exit("a launcher ended; run one by hand to see why")
        time.sleep(0.5)
    watched = [psutil.Process(process.pid) for process in processes]
    calls_before = squeues(fake)
    cpu_before = [cpu_s(process) for process in watched]
    time.sleep(seconds)
    calls = 60 * (squeues(fake) - calls_before) / seconds
    memory_mb = statistics.median(process.memory_info().rss for process in watched) / 1e6
    used = [cpu_s(process) - before for process, before in zip(watched, cpu_before)]
    percent = 100 * statistics.median(used) / seconds
    for process in processes:
        process.kill()
        process.wait()
    one_each = 60 / POLL_S * launchers
    return f"| {launchers} | {memory_mb:.0f} | {percent:.2f} | {calls:.0f} | {one_each:.0f} |"


def squeues(fake: Path) -> int:
    return sum(line.startswith("squeue") for line in (fake / "calls").read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 100, 400])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--launchers", type=int, default=20, help="0 for no second table")
    parser.add_argument(
        "--seconds", type=float, default=30, help="how long the launchers are watched"
    )
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, commit {commit.strip()}\n"
    )
    print(
        "| runs | jobs | wall s | CPU s | peak MB | CPU s of Snakemake |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for runs in arguments.runs:
            print(dry_run(Path(folder) / str(runs), runs, arguments.repeats), flush=True)
    if arguments.launchers == 0:
        return
    print("\n| launchers | MB each | CPU % each | squeue calls a minute | one each would be |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        print(waiting(Path(folder), arguments.launchers, arguments.seconds))


if __name__ == "__main__":
    main()
