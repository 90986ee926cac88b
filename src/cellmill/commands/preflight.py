"""preflight: tries the machine of a profile with the configuration.

First come the checks that need no job: the profile, SLURM, the configuration, the genes of its
datasets. Then those that only the nodes can answer, by one short job of the profile's launcher.
Each check is a line: ok, no, or ? for a doubt. Imports no torch.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from cellmill.config import Workflow, load_config
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError, UserError
from cellmill.files import write_json
from cellmill.launch.bad_nodes import HOW_TO_LIFT, BadNodes
from cellmill.launch.queue import Queue
from cellmill.planner.devices import find_device
from cellmill.preflight.check import Check, doubt, no
from cellmill.preflight.configuration import (
    check_genes,
    check_profile,
    check_run,
    list_unused_stages,
)
from cellmill.preflight.job_request import check_launcher, check_slurm, check_training
from cellmill.preflight.node_job import check_job
from cellmill.preflight.profile import Profile, name_entry, read_profile
from cellmill.preflight.rule_flags import check_python
from cellmill.preflight.site import ask_slurm
from cellmill.preflight.stage_requests import check_stages


def preflight(
    *,
    profile: str,
    config: Path,
    out: Path,
    no_job: bool,
    wait_min: float,
    node: str,
    results: Path,
) -> None:
    """Print the checks and `go`, and write them to `out`/NAME.json. Raise UserError if it is no go.

    With `node`, only test that node.
    """
    if not wait_min > 0:
        raise UserError(f"--wait-min: expected a number of minutes above 0, got {wait_min:g}")
    wait_s = 60 * wait_min
    read = read_profile(profile)
    pipeline: Workflow | None = None
    problem = ""
    try:
        pipeline = load_config(config)
    except ConfigError as error:
        problem = str(error)
    runs = pipeline.runs.values() if pipeline else ()
    names = sorted({run.machine or "" for run in runs} or {""})  # "" for runs that name none
    bad_nodes = BadNodes(results)
    if node:
        test_node(node, read, names, out, wait_s, bad_nodes)
        return
    checks = _Checks(read, profile, pipeline)
    jobs: dict[str, Iterable[Check]] = {}
    for name in names:
        can_queue = checks.check_machine(name)
        if name not in checks.facts:
            continue
        if no_job:
            jobs[name] = [doubt("job", "not tried (--no-job): the nodes were not checked")]
        elif not can_queue:
            jobs[name] = [doubt("job", "not tried: the profile has to change first")]
        else:  # a generator: the job is submitted when its checks are shown
            folder = out / name_entry(read.name, name)
            machine = read.machine(name)
            jobs[name] = check_job(machine, read.device(name), folder, wait_s, checks.facts[name])
    if checks.facts:
        checks.check_workflow(problem)
    for name, job in jobs.items():
        checks.show_job(name, job, bad_nodes)
    reasons = len([check for check in checks.shown if check.verdict == "no"])
    answer = {
        "profile": read.name,
        "path": str(read.path),
        "checked_at": time.time(),
        "go": not reasons,
        **checks.facts.pop("", {"machine": None}),
        "machines": checks.facts,
        "checks": [asdict(check) for check in checks.shown],
    }
    write_json(out / f"{read.name}.json", answer)
    if reasons:
        raise UserError(f"no go: {reasons} {'reason' if reasons == 1 else 'reasons'}")
    print("go")


class _Checks:
    """Checks of a profile with a configuration, which are printed as they are made."""

    def __init__(self, profile: Profile, argument: str, pipeline: Workflow | None) -> None:
        self.profile = profile
        self.argument = argument  # the profile as the user named it
        self.pipeline = pipeline  # None if the configuration is invalid
        self.shown: list[Check] = []
        # machine, end of its job and reports of its nodes, by name of the machine
        self.facts: dict[str, dict[str, Any]] = {}
        self._ask_slurm = cache(ask_slurm)

    def show(self, checks: Iterable[Check], machine: str = "") -> bool:
        """Print each check as it is made; return True if none is a no.

        `machine` is the name of the machine checked.
        """
        fits = True
        for check in checks:
            if machine:
                check = check.for_machine(machine)
            fits = fits and check.verdict != "no"
            self.shown.append(check)
            print(check)
        return fits

    def check_machine(self, name: str) -> bool:
        """Check a machine without a job; return True if a job can be submitted.

        A machine that the profile does not describe has no entry in `facts`.
        """
        try:
            machine = self.profile.machine(name)
            find_device(self.profile.device(name))
        except ConfigError as error:
            return self.show([no("profile", str(error))], name)
        self.facts[name] = {"machine": machine.model_dump(mode="json")}
        self.show(check_profile(machine, self.profile, self.argument, name), name)
        can_queue = self.show([check_launcher(machine)], name)
        if can_queue and machine.launcher == "slurm":
            ask = partial(self._ask_slurm, machine.slurm_cluster)
            can_queue = self.show(check_slurm(ask, partial(check_training, machine)), name)
        if self.pipeline:
            for run, options in self.pipeline.runs.items():
                if (options.machine or "") == name:
                    self.show([check_run(machine, self.pipeline, run)], name)
        return can_queue

    def check_workflow(self, problem: str) -> None:
        """Check the stages, if the profile makes them jobs of SLURM, and the genes of all datasets.

        `problem` says why the configuration is invalid.
        """
        if self.profile.options.get("executor") == "slurm":
            unused = list_unused_stages(self.pipeline)
            cluster = next(iter(self.facts.values()))["machine"]["slurm_cluster"]
            ask = partial(self._ask_slurm, cluster)
            self.show(check_slurm(ask, partial(check_stages, self.profile, unused)))
            try:
                check_python(sys.executable)
            except ConfigError as error:
                self.show([no("stages' Python", str(error))])
        if self.pipeline:
            self.show(check_genes(self.pipeline))
        else:
            self.show([no("configuration", problem)])

    def show_job(self, name: str, job: Iterable[Check], bad_nodes: BadNodes) -> None:
        """Print the checks of a machine's job, and exclude the nodes that they find bad."""
        begin = len(self.shown)
        self.show(job, name)
        machine = self.profile.machine(name)
        for check in self.shown[begin:]:
            # if more than half of the nodes are bad, the cause is elsewhere
            if machine.launcher == "slurm" and 2 * len(check.nodes) <= machine.node_counts[-1]:
                for bad_node in check.nodes:
                    bad_nodes.add(bad_node, f"preflight: {check.found}")
                    print(f"excluding {bad_node} from new jobs; {HOW_TO_LIFT}")


def list_node_states(machine: Machine) -> dict[str, str]:
    """Return SLURM's states of the nodes in the machine's partition, by name."""
    return Queue(machine.poll_s, machine.slurm_cluster).node_states(machine.slurm_partition)


def test_node(
    node: str, profile: Profile, names: list[str], out: Path, wait_s: float, bad_nodes: BadNodes
) -> None:
    """Test a node by a job of the first machine in `names` whose partition has it.

    Lift a node that passes from `bad_nodes`; add one that fails, and raise UserError.
    """
    for name in names:
        machine = profile.machine(name)
        if machine.launcher != "slurm" or node not in list_node_states(machine):
            continue
        options = f"{machine.sbatch_options} nodelist={node}"
        single = machine.model_copy(update={"nodes": "1", "sbatch_options": options})
        record: dict[str, Any] = {}
        folder = out / name_entry(profile.name, name)
        failed = ""
        for check in check_job(single, profile.device(name), folder, wait_s, record):
            print(check)
            if check.verdict == "no":
                failed = failed or check.found
        if not failed:
            bad_nodes.lift(node)
            print(f"{node} passes: new jobs may use it")
            return
        if "job" not in record:
            raise UserError(f"{node} was not tested: {failed}")
        bad_nodes.add(node, f"preflight: {failed}")
        raise UserError(f"{node} fails: excluded from new jobs")
    raise UserError(f"--node {node}: profile {profile.name} has no partition with this node")
