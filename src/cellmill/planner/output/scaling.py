"""Table of a run's time on smaller numbers of devices, up to all that the profile has."""

from cellmill.config.checks import check_nodes
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.errors import ConfigError
from cellmill.planner.cost import RunCost, estimate_cost
from cellmill.planner.devices import Device
from cellmill.planner.hardware import find_hardware
from cellmill.planner.memory import estimate_host_bytes_per_node, find_overflow
from cellmill.planner.output.format import format_bytes, format_hours
from cellmill.planner.step_counts import CorpusSize

ROW = "{:>12}  {:>8}  {:>10}  {:>10}"


def list_machines(machine: Machine) -> list[Machine]:
    """List copies of the machine with 1, 2, 4, … processes on one node, then with 2, 4, … nodes.

    The last copy has all nodes and processes of `machine`.
    """
    max_nodes = machine.node_counts[-1]
    sizes = [(1, nproc) for nproc in _list_doublings(machine.nproc_per_node)]
    sizes += [(nodes, machine.nproc_per_node) for nodes in _list_doublings(max_nodes)[1:]]
    return [
        machine.model_copy(update={"nodes": str(nodes), "nproc_per_node": nproc})
        for nodes, nproc in sizes
    ]


def _list_doublings(max_number: int) -> list[int]:
    """List the powers of two below `max_number`, and `max_number` itself."""
    numbers = [1]
    while numbers[-1] < max_number:
        numbers.append(min(2 * numbers[-1], max_number))
    return numbers


def format_scaling(
    options: PlanOptions, corpus: CorpusSize, machine: Machine, device_name: str, device: Device
) -> list[str]:
    """Format a table of times by number of devices. Return no lines for one device or an unknown speed.

    The efficiency of a row compares two GPU times. It is the GPU time on the fewest devices that fit,
    divided by the GPU time on the row's devices. Communication and idle pipelines lower the efficiency.
    """
    machines = list_machines(machine)
    if len(machines) == 1 or device.peak_flops_per_s(options.parallel) is None:
        return []
    lines = ["", ROW.format("GPUs", "time", "GPU time", "efficiency")]
    base_gpu_hours: float | None = None  # on the fewest devices that fit: the first row with a time
    for smaller in machines:
        nodes = smaller.node_counts[0]
        nproc = smaller.nproc_per_node
        count = f"{nodes} x {nproc} = {nodes * nproc}"
        try:
            time = _estimate_on_machine(options, corpus, smaller, device_name, device).time
        except ConfigError as error:
            # print the reason without its remedy: a remedy is for the whole machine
            lines.append(f"{count:>12}  {str(error).partition(';')[0]}")
            continue
        assert time is not None, "the speed is known"
        base_gpu_hours = base_gpu_hours or time.gpu_hours
        efficiency = f"{base_gpu_hours / time.gpu_hours:.0%}"
        hours = format_hours(time.hours)
        gpu_hours = format_hours(time.gpu_hours)
        lines.append(ROW.format(count, hours, gpu_hours, efficiency))
    lines.append(
        "efficiency: GPU time on the fewest GPUs that fit, over GPU time on these; communication and idle time lower "
        "it, and the effect of smaller batches per GPU is not estimated"
    )
    return lines


def _estimate_on_machine(
    options: PlanOptions, corpus: CorpusSize, machine: Machine, device_name: str, device: Device
) -> RunCost:
    """Estimate the run on the machine. Raise ConfigError if the run does not work there, or does not fit."""
    check_nodes(options, machine.node_counts, machine.nproc_per_node, corpus.n_cells)
    hardware = find_hardware(options, machine, device_name)
    overflow = find_overflow(options, corpus, hardware)
    cost = estimate_cost(options, corpus, hardware, device)
    if overflow == "device":
        usable = format_bytes(hardware.usable_bytes)
        raise ConfigError(f"needs {format_bytes(cost.memory.total)} of {usable} per process")
    if overflow == "host":
        needed = format_bytes(estimate_host_bytes_per_node(cost.model))
        raise ConfigError(
            f"needs {needed} of {format_bytes(hardware.requested_host_bytes)} host memory"
        )
    return cost
