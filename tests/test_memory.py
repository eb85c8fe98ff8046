"""The working memory stays within the limit, whatever the batch size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn
import saltflat

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
for _ in range(8):
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
x, y = torch.randn(48, 3, 32, 32), torch.randint(10, (48,))
saltflat.statistics_of(net, (x[:2], y[:2]), "curvature_diagonal", memory="1MiB")  # loads what is loaded once
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
saltflat.statistics_of(net, (x, y), "curvature_diagonal", memory="{limit}MiB")
print((status("VmHWM:") - before) / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("limit", [48, 96])
def test_one_large_batch_is_swept_within_the_limit(limit: int) -> None:
    code = SCRIPT.replace("{limit}", str(limit))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    extra = float(run.stdout)
    assert extra <= limit
    # All examples at once would take several times as much: the limit is what keeps it down.
    assert extra > 5
