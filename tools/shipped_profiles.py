"""The profiles of this repository for SLURM, each from a description of the site it is for.

`python tools/shipped_profiles.py` writes them; a test compares them. `cellmill profiles new` writes the
same text with the values of a real site.
"""

from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.files import write_text
from cellmill.preflight.new_profile import Place, Site, render

WHY = {
    "status_command": "needs no accounting; with accounting use sacct, which survives a controller outage",
    "nproc_per_node": "one process per GPU",
    "mem_mb": "all of a node's memory",
    "gpu": "gpu_model is the site's name of it: `sinfo -o %G`",
}


def any_cluster() -> Site:
    """One GPU, without the names of a site."""
    machine = _machine(gpus_per_node="1", runtime=240, mem_mb=64000, cpus_per_task=8)
    why = {"mem_mb": "per node; 0 for all of it", "gpus": "or gres: gpu:1, for sites that support only --gres"}
    return Site(
        head=_head("slurm", "Any SLURM cluster"),
        machine=machine,
        device="a100",
        stages=Place(),
        vectors=Place(),
        gpu={"slurm_partition": "gpu", "gpu": 1, "tasks_per_gpu": 0},
        status_command="squeue",
        why=WHY | why,
    )


def gpu_nodes(gpu: str, nodes: int, gpus: int, cpus: int, described: str) -> Site:
    """Whole nodes of one type of GPU, in a partition of its name."""
    partition, per_node = f"gpu-{gpu}", f"{gpu}:{gpus}"
    return Site(
        head=_head(f"slurm-{gpu}", described),
        machine=_machine(
            nodes=str(nodes),
            nproc_per_node=gpus,
            gpus_per_node=per_node,
            slurm_partition=partition,
            runtime=1440,
            cpus_per_task=cpus,
        ),
        device=gpu,
        stages=Place("cpu"),
        vectors=Place(partition),
        gpu={"slurm_partition": partition, "gpu": 1, "gpu_model": gpu, "tasks_per_gpu": 0},
        status_command="squeue",
        why=WHY | {"gpus": f"or gres: gpu:{per_node}, for sites that support only --gres"},
    )


def shipped() -> dict[str, str]:
    """The text of each profile by its name."""
    return {
        "slurm": render(any_cluster()),
        "slurm-a100": render(gpu_nodes("a100", nodes=2, gpus=4, cpus=32, described="Nodes of four A100")),
        "slurm-h100": render(gpu_nodes("h100", nodes=1, gpus=8, cpus=96, described="Nodes of eight H100")),
    }


def _machine(**options: str | int) -> Machine:
    return Machine.model_validate({"launcher": "slurm", "save_within_s": 300} | options)


def _head(name: str, described: str) -> str:
    account = "Add slurm_account, twice, where a site has no default."
    return f"# {described}: `cellmill preflight --profile {name}` checks it. {account}"


if __name__ == "__main__":
    for name, text in shipped().items():
        write_text(Path("profiles") / name / "config.yaml", text)
