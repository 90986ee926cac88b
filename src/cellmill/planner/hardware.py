"""The processes that a machine gives a run, and the memory of each process."""

import math
import os
from dataclasses import dataclass

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel, divide_processes
from cellmill.planner.devices import find_device
from cellmill.planner.units import GB


@dataclass(frozen=True)
class Hardware:
    """The processes of a run, and the memory of each process."""

    # Number of nodes. Of a range it is the fewest, since a process needs the most memory with few nodes.
    nodes: int
    nproc_per_node: int  # processes per node
    device_name: str  # a key of `planner.devices.DEVICES`; all processes have equal devices
    device_bytes: int  # device memory of one process; on CPUs its share of the node's memory
    usable_bytes: int  # `plan.memory_frac` of `device_bytes`
    # host memory that a job requests per node; 0 if it requests all, or if this is unknown
    requested_host_bytes: int = 0
    max_nodes: int | None = None  # most nodes of a range; None if the run has exactly `nodes`

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def node_counts(self) -> range:
        """Every number of nodes that the run may get."""
        return range(self.nodes, (self.max_nodes or self.nodes) + 1)

    def divide(self, parallel: Parallel) -> Layout:
        """Divide the processes over the axes of a layout. Raise ConfigError if this is impossible."""
        return divide_processes(parallel, self.world_size, self.nproc_per_node)

    def adapt_lanes(self, options: PlanOptions) -> PlanOptions:
        """Copy the options with a number of lanes that the data-parallel ranks can share evenly.

        The number of lanes must be a multiple of the data-parallel ranks, on every number of nodes, and
        must divide the global batch. The lanes stay as they are if they satisfy both conditions, or if no
        tried number does. Raise ConfigError if the layout does not divide the processes.
        """
        nproc = self.nproc_per_node
        # smallest common multiple of the data-parallel ranks on all numbers of nodes
        dp = math.lcm(
            *(
                divide_processes(options.parallel, nodes * nproc, nproc).dp
                for nodes in self.node_counts
            )
        )
        lanes = options.stream.lanes
        for candidate in (lanes, math.lcm(lanes, dp), dp):
            if candidate % dp == 0 and options.train.global_batch % candidate == 0:
                stream = options.stream.model_copy(update={"lanes": candidate})
                return options.model_copy(update={"stream": stream})
        return options


def find_hardware(options: PlanOptions, machine: Machine, device_name: str) -> Hardware:
    """Find the processes that `machine` gives a run, and the memory of each process.

    Processes on CPUs share the memory that a job requests per node. If the job requests all memory of a
    node, the node is assumed to have as much memory as this machine.
    """
    memory_gb = options.plan.memory_gb or find_device(device_name).memory_gb
    if memory_gb:
        device_bytes = round(memory_gb * GB)
    else:
        this_machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        node_bytes = machine.node_memory_bytes or this_machine_bytes
        device_bytes = node_bytes // machine.nproc_per_node
    usable_bytes = int(device_bytes * options.plan.memory_frac)
    return Hardware(
        nodes=machine.node_counts[0],
        nproc_per_node=machine.nproc_per_node,
        device_name=device_name,
        device_bytes=device_bytes,
        usable_bytes=usable_bytes,
        requested_host_bytes=machine.node_memory_bytes,
        max_nodes=machine.node_counts[-1],
    )
