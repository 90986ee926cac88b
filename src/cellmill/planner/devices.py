"""Memory and peak rates of devices from the vendors' data sheets: dense matrix products, and links.

The rates of links are per device and direction, in the vendors' own servers.

Inside a node, devices are linked by NVLink or Infinity Fabric. l40s is linked by PCIe 4.0 x16, and the
pcie and nvl forms by PCIe 5.0 x16. Bridges between some nvl devices are not counted.

To other nodes, the devices of a node share its network cards equally:

- DGX-1 (v100) has 4 cards of 100 Gb/s for 8 devices;
- DGX A100 has 8 cards of 200 Gb/s for 8 devices;
- DGX H100, H200 and B200, and MI300X platforms, have 8 cards of 400 Gb/s for 8 devices;
- servers with PCIe, such as those with l40s, have 2 cards of 200 Gb/s for 4 devices.
"""

import re
from dataclasses import dataclass, replace

from cellmill.config.parallel import Parallel
from cellmill.errors import ConfigError

# the name of a slice of a GPU (MIG), such as 3g.20gb
SLICE = re.compile(r"\d+g\.\d+gb")
# GB of memory in the name of a product, such as 80gb or 64g
MEMORY = re.compile(r"(?<![\d.])(\d+)gb?(?![a-z0-9])")
# If the name of a product states a memory that differs from the planned memory by more than this fraction,
# the product is another version of the device.
OTHER_MEMORY_FRAC = 0.1


@dataclass(frozen=True)
class Device:
    """Memory and peak rates of one device. A rate is None if it is unknown."""

    memory_gb: float | None  # None if the device uses the machine's own memory
    half_flops_per_s: float | None  # in bfloat16 and float16
    fp32_flops_per_s: float | None
    intra_node_gb_per_s: float | None  # GB/s to devices of the same node
    inter_node_gb_per_s: float | None  # GB/s to devices of other nodes
    has_bf16: bool = True  # True if the device computes in bfloat16
    tf32_flops_per_s: float | None = None  # None if the device has no TF32

    def peak_flops_per_s(self, parallel: Parallel) -> float | None:
        """Find the peak FLOP/s in the number format of a run. None if it is unknown."""
        if parallel.half_precision:
            return self.half_flops_per_s
        if parallel.tf32 and self.tf32_flops_per_s:
            return self.tf32_flops_per_s
        return self.fp32_flops_per_s


# The numbers of a device are, in order: GB of memory, FLOP/s in half precision and in fp32, GB/s inside a
# node and to other nodes.
_V100 = Device(32, 125e12, 15.7e12, 150, 6.25, has_bf16=False)
_A100 = Device(80, 312e12, 19.5e12, 300, 25, tf32_flops_per_s=156e12)
_H100 = Device(80, 989e12, 67e12, 450, 50, tf32_flops_per_s=494e12)
_H100_PCIE = Device(80, 756e12, 51e12, 64, 12.5, tf32_flops_per_s=378e12)
_H100_NVL = Device(94, 835e12, 60e12, 64, 12.5, tf32_flops_per_s=417e12)
DEVICES = {
    "cpu": Device(None, None, None, None, None),
    "v100": _V100,
    "v100-16gb": replace(_V100, memory_gb=16),
    "v100-32gb": _V100,
    "a100": _A100,
    "a100-40gb": replace(_A100, memory_gb=40),
    "a100-80gb": _A100,
    "l40s": Device(48, 362e12, 91.6e12, 32, 12.5, tf32_flops_per_s=183e12),
    "h100": _H100,
    "h100-pcie": _H100_PCIE,
    "h100-nvl": _H100_NVL,
    "h200": replace(_H100, memory_gb=141),
    "h200-nvl": replace(_H100_NVL, memory_gb=141),
    "b200": Device(180, 2250e12, 75e12, 900, 50, tf32_flops_per_s=1100e12),
    "mi300x": Device(192, 1307e12, 163.4e12, 448, 50, tf32_flops_per_s=653e12),
}


def find_device(name: str) -> Device:
    """Look up the device that a profile names. Raise ConfigError for an unknown one."""
    if name not in DEVICES:
        raise ConfigError(
            f"unknown device {name!r}; set device (--device, or set-resources: plan in the profile) to one of: "
            f"{', '.join(DEVICES)}"
        )
    return DEVICES[name]


def recognise_device(product: str) -> str:
    """Find the name of a product's device, such as h100 for nvidia_h100_80gb_hbm3. "" if it is unknown.

    A slice of a device has the name of the whole device, such as a100 for a100_3g.20gb.
    """
    words = product.lower()

    # the name of the device without its form or its size of memory, such as a100 of a100-40gb
    chip = ""
    for name in DEVICES:
        # nodes with GPUs may have a feature such as cpu-milan
        if name != "cpu" and "-" not in name and re.search(rf"(?<![a-z0-9]){name}(?!\d)", words):
            chip = name
            break

    form = re.search(r"(?<![a-z])(pcie|nvl)(?![a-z])", words)
    if form and f"{chip}-{form[1]}" in DEVICES:
        return f"{chip}-{form[1]}"

    memory = MEMORY.search(words)
    sized = f"{chip}-{memory[1]}gb" if memory else ""
    return sized if sized in DEVICES else chip


def find_other_memory_gb(product: str, name: str) -> int | None:
    """Find the GB of memory that the name of a product states, if device `name` is planned with others.

    None if the two agree, if either is unknown, or if the product is a slice of a GPU.
    """
    stated = MEMORY.search(product.lower())
    planned = DEVICES[name].memory_gb
    if stated is None or planned is None or SLICE.search(product.lower()):
        return None
    stated_gb = int(stated[1])
    return stated_gb if abs(stated_gb / planned - 1) > OTHER_MEMORY_FRAC else None


def list_sized_devices(name: str) -> list[str]:
    """List the devices that have `name` and a size of memory, such as a100-40gb for a100."""
    return [sized for sized in DEVICES if re.fullmatch(rf"{name}-\d+gb", sized)]


def describe_assumption(name: str) -> str:
    """Say which memory is assumed for a device that is made with several sizes. "" for other devices."""
    memory_gb = DEVICES[name].memory_gb
    others = [sized for sized in list_sized_devices(name) if DEVICES[sized].memory_gb != memory_gb]
    if not others:
        return ""
    return f"{name} is planned with {memory_gb:g} GB; set device to {' or '.join(others)} if it has less"


def check_precision(parallel: Parallel, name: str, device: Device) -> None:
    """Raise ConfigError if device `name` does not support the number format of a run."""
    if parallel.precision == "bf16-mixed" and not device.has_bf16:
        raise ConfigError(
            f"parallel.precision bf16-mixed: a {name} has no bfloat16; set it to 16-mixed"
        )
    if parallel.tf32 and device.fp32_flops_per_s is not None and device.tf32_flops_per_s is None:
        raise ConfigError(f"parallel.tf32: a {name} has no TF32; set it to no")


def find_peak_flops_per_s(product: str, parallel: Parallel) -> float | None:
    """Find the peak FLOP/s of a product, such as NVIDIA H100 80GB HBM3, in the number format of a run.

    None if it is unknown, such as for a slice of a GPU.
    """
    name = recognise_device(product)
    if not name or SLICE.search(product.lower()):
        return None
    return DEVICES[name].peak_flops_per_s(parallel)
