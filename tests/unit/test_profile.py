"""A profile is read as Snakemake reads it: a dry run is the reference."""

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake.cli import parse_set_resources
from snakemake.profiles import ProfileConfigFileParser

from cellmill.arguments import machine
from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.config.workflow import RunConfig
from cellmill.errors import ConfigError
from cellmill.preflight.profile import (
    find_as_snakemake,
    find_profile,
    read_command,
    read_profile,
)
from cellmill.preflight.rule_flags import plan_arguments, plan_resources

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with no profile of this user or site in reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", f"{tmp_path / 'site'}:/etc/xdg")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(text: str, place: str = "profiles/one/config.yaml") -> Path:
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def as_snakemake(path: Path) -> dict[str, Any]:
    """Resources of train that Snakemake computes from a profile, for a rule with one thread."""
    with open(path, encoding="utf-8") as file:
        given = ProfileConfigFileParser().parse(file)["set-resources"]
    found = parse_set_resources(given)["train"]
    asked: dict[str, Any] = {
        "wildcards": {},
        "input": [],
        "attempt": 1,
        "threads": 1,
        "rulename": "train",
    }
    return {name: value.evaluate(**asked, async_run=None).value for name, value in found.items()}


@pytest.mark.parametrize(
    "train",
    [
        {"nodes": 2, "nproc_per_node": 8, "slurm_partition": "gpu-a100", "gpus_per_node": "a100:4"},
        {"nodes": "2", "nproc_per_node": "4", "qos": "12", "slurm_account": "'7'", "mem_mb": 0},
        {
            "nodes": "'1-2'",
            "slurm_partition": "gpu-a,gpu-b",
            "constraint": "a100&ib",
            "interface": "ib0",
        },
        *(
            {"runtime": time}
            for time in ("2h", "1.5 hours", "90", "90 min", 1.5, "'3h'", "30 * 4", "30 * attempt")
        ),
        *({"mem": size} for size in ("8G", "1.5 TB", "16 GiB", 4000)),
        *({"mem_mb": size} for size in ("threads * 2000", "attempt * 4000 // 3")),
        {
            "mem_mib": 4096,
            "poll_s": 2.5,
            "modules": "cuda/12.4 nccl",
            "sbatch_options": "exclude=node7 exclusive",
        },
        {
            "slurm_partition": "a100-2g.10gb",
            "constraint": "[a|b]",
            "gres": "gpu:h100:4",
            "slurm_account": "p1.sub",
        },
        {
            "slurm_account": "$CELLMILL_TEST_ACCOUNT",
            "container": "~/x.sif",
            "constraint": "(a100|h100)&nvlink",
        },
    ],
    ids=str,
)
def test_values_equal_those_that_snakemake_gives_the_rule(
    train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELLMILL_TEST_ACCOUNT", "lab")
    path = write(yaml.safe_dump({"set-resources": {"train": train}}, sort_keys=False))
    assert read_profile("one").train == as_snakemake(path)


def test_a_list_of_assignments_is_a_mapping_too() -> None:
    path = write("set-resources:\n- train:nodes=2\n- train:runtime=2h\n- plan:nodes=2\n")
    found = read_profile("one")
    assert found.train == as_snakemake(path) == {"nodes": 2, "runtime": 120}
    assert found.plan == {"nodes": 2}


PROFILE = """
cores: 2
default-resources: {slurm_partition: cpu, slurm_account: lab, runtime: 5, interface: eth0}
set-threads: {train: 2}
set-resources:
  plan: {nproc_per_node: 2, device: a100}
  train:
    {launcher: slurm, nodes: "'1-2'", nproc_per_node: 2, slurm_partition: gpu-a100, gpus_per_node: "a100:2",
    runtime: 2h, mem: 3 GB, cpus_per_task: threads * 2, modules: cuda/12.4 nccl, poll_s: 2,
    sbatch_options: exclude=node7 exclusive}
"""


def test_the_machine_is_what_the_rule_train_is_called_with(alone: Path) -> None:
    """With the real Snakefile: defaults of the profile, then the rule's own, then set-resources."""
    write(PROFILE)
    (alone / "config").mkdir()
    for name in ("config.yaml", "datasets.tsv"):
        (alone / "config" / name).write_text((REPOSITORY / "config" / name).read_text())
    words = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(REPOSITORY / "Snakefile"),
        "--dry-run",
        "-p",
    ]
    done = subprocess.run(
        [*words, "--profile", "profiles/one"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    [called] = re.findall(r" cellmill train (.*) 2>&1", done.stdout)
    flags = shlex.split(called.replace('"$(', "").replace(')"', ""))
    parser = ArgumentParser()
    for flag, options in machine(Machine.model_fields):
        parser.add_argument(flag, **options)
    given = vars(parser.parse_known_args(flags)[0])
    assert read_profile("one").machine() == check_options(Machine, given, "the rule's flags")


@pytest.mark.parametrize(
    ("train", "named", "flags"),
    [
        ({"mem_mb": 9000}, {}, "--mem-mb 9000"),
        ({"mem_mb": 9000}, {"mem_mb": 7000}, "--mem-mb 7000"),
        (
            {"mem_mb_per_gpu": 9000, "gpus_per_node": "a100:2", "cpus_per_task": 8},
            {},
            "--mem-mb 0 --mem-mb-per-gpu 9000 --cpus-per-task 8 --gpus-per-node a100:2",
        ),
        ({"mem_mb": 9000}, {"mem_mb_per_cpu": 500}, "--mem-mb 0 --mem-mb-per-cpu 500"),
        ({"mem_mb_per_cpu": 500}, {"mem_mb": 9000}, "--mem-mb 9000"),
    ],
    ids=str,
)
def test_a_plan_gets_the_memory_of_its_training(
    train: dict[str, Any], named: dict[str, Any], flags: str
) -> None:
    plan = {"device": "a100", "mem_mb": 500}  # of the job that plans
    entries = {"plan": plan, "train": {"nproc_per_node": 2} | train, "train.other": named}
    write(yaml.safe_dump({"set-resources": entries}))
    command = read_command(["--profile", "profiles/one"])
    resources = SimpleNamespace(**plan_resources(command))
    sections: dict[str, Any] = {
        name: {} for name, field in RunConfig.model_fields.items() if field.is_required()
    }
    sections |= {"corpus": "sim", "machine": "other" if named else None, "train": {"steps": 1}}
    run = RunConfig.model_validate(sections)
    found = plan_arguments(command, "tiny", run, resources)
    assert " ".join(found) == f"--nodes 1 --nproc-per-node 2 {flags} --device a100"


def test_default_resources_do_not_reach_a_training() -> None:
    write(
        "default-resources: {slurm_partition: cpu, slurm_account: lab, runtime: 5}\nset-resources: {train: {qos: x}}\n"
    )
    found = read_profile("one")
    assert found.unread == ["slurm_partition", "slurm_account"]
    assert found.machine() == Machine(qos="x")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"nodes": "1-2"}, "nodes: Snakemake reads '1-2' as -1; write \"'1-2'\", in both quotes"),
        ({"slurm_partition": "all"},
         "slurm_partition: Snakemake reads 'all' as Python; write \"'all'\", in both quotes, for a text"),
        ({"mem_mb": "input.size_mb"},
         "mem_mb: expected a number without quotes, got 'input.size_mb'; `mem: 16G` takes a unit"),
        ({"runtime": "1-00:00:00"}, "runtime: expected a time such as 90 (minutes) or 2h, got '1-00:00:00'"),
        ({"mem": "lots"}, "mem: expected a size such as 16000 (MB) or 16G, got 'lots'"),
        ({"mem_mb": "0"}, "mem_mb: expected a number without quotes, got '0'; `mem: 16G` takes a unit"),
        ({"mem": "8G", "mem_mb": 8000}, "mem_mb is given twice, in two units"),
        ({"partition": "gpu"}, "unknown key 'partition'; did you mean 'slurm_partition'?"),
    ],
)  # fmt: skip
def test_an_invalid_value_of_a_profile_is_named(train: dict[str, Any], message: str) -> None:
    write(yaml.safe_dump({"set-resources": {"train": train}}, sort_keys=False))
    with pytest.raises(ConfigError) as error:
        read_profile("one").machine()
    assert str(error.value) == f"profiles/one/config.yaml: set-resources: train: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: [\n",
            "Couldn't parse config file: while parsing a flow node expected the node content, but found",
        ),
        (
            "set-resources: {train: 4}\n",
            "Invalid set-resources format in profile. Expected two-level mapping, got",
        ),
        (
            "set-resources: [train=4]\n",
            "set-resources: expected rule:resource=value, got 'train=4'",
        ),
        ("default-resources: 4\n", "default-resources: expected a mapping, got '4'"),
    ],
)
def test_an_invalid_profile_is_refused_in_one_line(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as error:
        read_profile("one")
    assert str(error.value).startswith(f"profiles/one/config.yaml: {message}")
    assert "\n" not in str(error.value)


def test_a_name_is_looked_up_in_profiles_first(alone: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_profile("one")
    places = f"profiles/one, {alone}/one, {alone}/user/snakemake/one, {alone}/site/snakemake/one"
    assert (
        str(error.value) == f"no profile 'one': none of {places} is a profile or has a config.yaml"
    )
    for place in ("site/snakemake/one", "user/snakemake/one", "one", "profiles/one"):
        path = write("cores: 1\n", f"{place}/config.yaml")
        assert find_profile("one").resolve() == path.resolve()
        if place != "profiles/one":
            assert find_as_snakemake("one").resolve() == path.resolve()
    assert find_as_snakemake("one") == Path("one/config.yaml"), (
        "Snakemake does not look into profiles/"
    )


def test_a_path_is_used_with_its_newest_profile_file(alone: Path) -> None:
    write("cores: 1\n", "x/mine.yaml")
    assert read_profile("x/mine.yaml").name == "mine"
    for name in ("config.yaml", "config.v8+.yaml", "profile.v9+.yaml", "profile.v99+.yaml"):
        write("cores: 1\n", f"site profiles/big/{name}")
    found = read_profile("site profiles/big")
    assert (found.name, found.path) == ("big", Path("site profiles/big/profile.v9+.yaml"))


def test_profiles_default_overrides_key_by_key() -> None:
    write("set-resources: {train: {nodes: 4, qos: long}}\nset-threads: {train: 4}\n")
    over = write("set-resources: {train: {nodes: 1}}\n", "profiles/default/config.yaml")
    found = read_profile("one")
    assert (found.train, found.overriding) == ({"nodes": 1}, over)
