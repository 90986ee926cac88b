"""Readings in metrics.jsonl: memory and GPU of each rank, and the time left."""

import pytest
import torch

from cellmill.train.telemetry import UNKNOWN, TimeLeft, gpu_readings, readings_line

MEMORY = [2e9, 1e9]
"""Peak and current memory of a rank."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nothing_is_logged_without_a_gpu() -> None:
    assert gpu_readings(torch.device("cuda", 0)) == [UNKNOWN] * 3
    memory = {"peak_allocated_gb": [2.0, 2.0], "allocated_gb": [1.0, 1.0]}
    assert readings_line("cuda", [*MEMORY, *[UNKNOWN] * 3] * 2, 2) == memory
    assert readings_line("cpu", MEMORY, 1) == {"peak_resident_gb": [2.0], "resident_gb": [1.0]}


def test_a_line_has_a_number_for_each_rank() -> None:
    first = [*MEMORY, 87.0, 70e9, 650_432.0]
    second = [*MEMORY, 3.0, 1.5e9, UNKNOWN]
    two = readings_line("cuda", first + second, 2)
    one = readings_line("cuda", first, 1)
    assert (two["gpu_busy_frac"], two["gpu_used_gb"], "gpu_power_w" in two) == (
        [0.87, 0.03],
        [70.0, 1.5],
        False,
    )
    assert (one["gpu_busy_frac"], one["gpu_used_gb"], one["gpu_power_w"]) == (
        [0.87],
        [70.0],
        [650.432],
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_readings_of_a_gpu_equal_nvml() -> None:
    pynvml = pytest.importorskip(
        "pynvml", reason="nvidia-ml-py is not installed: pip install 'cellmill[nvml]'"
    )
    held = torch.ones(1 << 28, device="cuda")  # 1 GiB
    busy, used, power = gpu_readings(torch.device("cuda", 0))
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert 0 <= busy <= 100
    assert held.nbytes < used <= pynvml.nvmlDeviceGetMemoryInfo(handle).total
    assert 0.3 < power / pynvml.nvmlDeviceGetPowerUsage(handle) < 3


def test_the_time_left_follows_recent_steps() -> None:
    left = TimeLeft(steps=1000, first=100, since=50.0)
    # the first step takes long, the ten windows after it 2 s a step
    assert left.line(101, 150.0) == {"left_s": 899 * 100.0}
    now = 150.0
    for step in range(111, 211, 10):
        now += 20.0
        line = left.line(step, now)
    assert line == {"left_s": 799 * 2.0}
    # a pause of 60 s after 101 steps of this process comes again as often, and is no part of the
    # next steps
    left.pause(60.0)
    assert left.line(211, now + 62.0) == {"left_s": round(789 * (2.0 + 60 / 111), 1)}
    # steps that became four times slower are the pace once they are most of the last ten
    now += 62.0
    for step in range(212, 218):
        now += 8.0
        line = left.line(step, now)
    assert line == {"left_s": round(783 * (8.0 + 60 / 117), 1)}
    assert left.line(1000, now) == {"left_s": 0.0}
