"""The profiles of this repository for SLURM, each from a description of the site it is for.

`python tools/shipped_profiles.py` writes them; a test compares them. `cellmill profiles new` writes
the same text with the values of a real site.
"""

from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.files import write_text
from cellmill.preflight.profile_text import Site, StagePartition, render

WHY = {
    "status_command": "needs no accounting; with accounting use sacct, which survives a controller outage",
    "nproc_per_node": "one process per GPU",
    "mem_mb": "all of a node's memory",
    "gpu": "gpu_model is the site's name of it: `sinfo -o %G`",
}


def site(
    name: str,
    described: str,
    gpu: str,
    machine: dict[str, Any],
    stages: str,
    on_a_gpu: str,
    **why: str,
) -> Site:
    """The site of a profile: partitions of its stages, and of those on one GPU."""
    model = {} if gpu not in machine["gpus_per_node"] else {"gpu_model": gpu}
    return Site(
        head=f"# {described}: `cellmill preflight --profile {name}` checks it; profiles/README.md explains its keys, "
        "and slurm_account.",
        machine=Machine.model_validate({"launcher": "slurm", "save_within_s": 300} | machine),
        device=gpu,
        stages=StagePartition(stages),
        gpu_stages=StagePartition(stages and on_a_gpu),
        gpu={"slurm_partition": on_a_gpu, "gpu": 1} | model | {"tasks_per_gpu": 0},
        status_command="squeue",
        why=WHY
        | {
            "gpus_per_node": f"or gres: gpu:{machine['gpus_per_node']}, for sites that support only --gres"
        }
        | why,
    )


def gpu_nodes(gpu: str, nodes: int, gpus: int, cpus: int, described: str) -> Site:
    """Whole nodes of one type of GPU, in a partition of its name."""
    machine = {
        "nodes": nodes,
        "nproc_per_node": gpus,
        "gpus_per_node": f"{gpu}:{gpus}",
        "cpus_per_task": cpus,
    }
    machine |= {"slurm_partition": f"gpu-{gpu}", "runtime": 1440}
    return site(f"slurm-{gpu}", described, gpu, machine, "cpu", f"gpu-{gpu}")


def shipped() -> dict[str, str]:
    """The text of each profile by its name."""
    one_gpu = {"gpus_per_node": "1", "runtime": 240, "mem_mb": 64000, "cpus_per_task": 8}
    any_cluster = site(
        "slurm", "Any SLURM cluster", "a100", one_gpu, "", "gpu", mem_mb="per node; 0 for all of it"
    )
    return {
        "slurm": render(any_cluster),
        "slurm-a100": render(
            gpu_nodes("a100", nodes=2, gpus=4, cpus=32, described="Nodes of four A100")
        ),
        "slurm-h100": render(
            gpu_nodes("h100", nodes=1, gpus=8, cpus=96, described="Nodes of eight H100")
        ),
    }


if __name__ == "__main__":
    for name, text in shipped().items():
        write_text(Path("profiles") / name / "config.yaml", text)
