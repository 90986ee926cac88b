"""Readings of GPUs in metrics.jsonl: units, and nothing where they cannot be had."""

from __future__ import annotations

import pytest
import torch

from cellmill.train.telemetry import UNKNOWN, gpu_line, gpu_readings


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_or_its_package_nothing_is_logged_and_nothing_raised() -> None:
    assert gpu_readings(torch.device("cuda", 0)) == [UNKNOWN] * 3
    assert gpu_line([UNKNOWN] * 6) == {}
    assert gpu_line([]) == {}


def test_a_line_has_a_number_for_each_rank_and_only_what_all_ranks_know() -> None:
    two_ranks = [87.0, 70e9, 650_432.0, 3.0, 1.5e9, UNKNOWN]
    assert gpu_line(two_ranks) == {"gpu_busy_frac": [0.87, 0.03], "gpu_used_gb": [70.0, 1.5]}
    assert gpu_line(two_ranks[:3]) == {"gpu_busy_frac": [0.87], "gpu_used_gb": [70.0], "gpu_power_w": [650.432]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_readings_of_a_gpu_are_those_of_nvml() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install 'cellmill[nvml]'")
    held = torch.ones(1 << 28, device="cuda")  # 1 GiB
    busy, used, power = gpu_readings(torch.device("cuda", 0))
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert 0 <= busy <= 100
    assert held.nbytes < used <= pynvml.nvmlDeviceGetMemoryInfo(handle).total
    assert 0.3 < power / pynvml.nvmlDeviceGetPowerUsage(handle) < 3
