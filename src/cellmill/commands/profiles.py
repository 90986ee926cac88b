"""profiles: install links the profiles of a folder, new writes one for a partition of a cluster."""

import os
import re
import shlex
from pathlib import Path

from cellmill.errors import DataError, UserError
from cellmill.files import atomic_path
from cellmill.preflight.new_profile import choose_values
from cellmill.preflight.partitions import Request
from cellmill.preflight.profile import find_as_snakemake, read_profile
from cellmill.preflight.profile_text import Site, render
from cellmill.preflight.site import ask_slurm


def profiles_install(*, source: Path) -> None:
    """Link each profile in `source` whose name is free, and name the others.

    Raise DataError if none is linked.
    """
    profiles = sorted(path.parent.resolve() for path in source.glob("*/config.yaml"))
    if not profiles:
        raise DataError(
            f"{source}: has no profiles; run this at the root of a checkout, or set --from FOLDER"
        )
    if any(profile.name == "default" for profile in profiles):
        raise DataError(
            f"{source}/default: Snakemake loads a profile of that name unasked, and it overrides --profile key by key; "
            "rename it"
        )
    base = os.environ.get(
        "XDG_CONFIG_HOME", ""
    ).strip()  # where Snakemake looks for a user's profiles
    target = (Path(base) if base else Path.home() / ".config") / "snakemake"
    target.mkdir(parents=True, exist_ok=True)
    links = []
    for profile in profiles:
        link = target / profile.name
        if not os.path.lexists(link):
            link.symlink_to(profile)
        if link.resolve() == profile:
            links.append(link)
            print(f"snakemake --profile {profile.name}   {link} -> {profile}")
        else:
            taken = f"a link to {link.resolve()}" if link.is_symlink() else "not a link"
            print(
                f"{profile.name}: not linked, because {link} is {taken}; use --profile {source}/{profile.name}"
            )
    if not links:
        raise DataError(
            f"{source}: no profile is linked, because their names are taken in {target}"
        )
    print(f"to undo: rm {shlex.join(map(str, links))}")


def profiles_new(
    *,
    name: str,
    cluster: str,
    partition: str,
    nodes: str,
    gpus: int | None,
    account: str,
    qos: str,
    into: Path,
) -> None:
    """Write `into`/NAME/config.yaml. Raise UserError if it exists, or SLURM has no such machine."""
    folder = into / name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(f"NAME: expected letters, digits, '.', '_' and '-', got {name!r}")
    if name == "default":
        raise UserError(
            "NAME default: Snakemake loads a profile of that name unasked; choose another"
        )
    existing = find_as_snakemake(str(folder)) if folder.exists() else None
    if existing is not None:
        raise UserError(f"{existing}: exists; choose another NAME, or remove it")
    match = re.fullmatch(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", nodes or "1")
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"--nodes: expected a number such as 2 or a range such as 2-4, got {nodes!r}"
        )
    if gpus is not None and gpus < 0:
        raise UserError(f"--gpus: expected a number of GPUs per node, 0 for none, got {gpus}")
    request = Request(partition, nodes, gpus, account, qos, cluster)
    site = choose_values(ask_slurm(cluster), request, name)
    file = folder / "config.yaml"
    with atomic_path(file) as temporary:
        temporary.write_text(render(site), encoding="utf-8")
        written = read_profile(str(temporary))
        # Snakemake reads what was meant; profiles/default may override it
        assert written.overriding or (written.machine(), written.device()) == (
            site.machine,
            site.device,
        ), written
    print(f"wrote {file}")
    _print_values(site)
    print(f"next: cellmill preflight --profile {shlex.quote(str(folder))}")


def _print_values(site: Site) -> None:
    """Print the values that matter, each with its reason."""
    machine = site.machine
    why = site.why
    gpus = machine.gpus_per_node or machine.gres
    shown_gpus = f"GPUs {gpus}, " if gpus else ""
    n = machine.nproc_per_node
    processes = f"{n} {'process' if n == 1 else 'processes'}"
    memory = machine.memory_text or "all memory"
    device = f"{site.device}: {why['device']}" if why["device"] else site.device
    print(f"  train     partition {machine.slurm_partition}: {why['slurm_partition']}")
    print(
        f"            nodes {machine.nodes}, on each {shown_gpus}{processes}, "
        f"{machine.cpus_per_task} CPU cores, {memory}; {machine.runtime} min per job"
    )
    print(f"  stages    partition {site.stages.partition}: {why['stages_partition']}")
    print(f"  plan      device {device}")
    print(f"  account   {machine.slurm_account or 'none'}: {why['slurm_account']}")
    print(f"  status    {site.status_command}: {why['status_command']}")
