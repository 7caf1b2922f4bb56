"""Tuning on a card of 8 GiB, of which the user's limit leaves little: what fits is planned."""

from __future__ import annotations

import json
from math import ceil

CARD = 8 << 30
FRACTION = 0.02  # 164 MiB
PROGRAM = f"""
import warnings, torch, ucudnn
from torch import nn
torch.cuda.set_per_process_memory_fraction({FRACTION})
held = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
layers = nn.Conv3d(4, 16, 3, padding=1), nn.ReLU(), nn.AvgPool3d(8), nn.Conv3d(16, 4, 3)
model, x = nn.Sequential(*layers).cuda(), torch.empty(2, 4, 96, 96, 96, device="cuda").normal_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plan = ucudnn.tune(model, x, ucudnn.Config(policy="undivided", ops=("fprop",)))
print([str(kernel.problem) for kernel in plan.kernels])
print(list(plan.left_out))
print(*(one.message for one in caught if one.category is ucudnn.errors.UntunedWarning))
"""


def test_both_processes_stay_within_the_limit_of_the_user(simulated, repository, tmp_path):
    profile = json.loads((repository / "benchmarks" / "devices" / "h200.json").read_text())
    card, memory = tmp_path / "card.json", tmp_path / "memory"
    card.write_text(json.dumps({**profile, "totalGlobalMem": CARD}))
    memory.mkdir()
    done = simulated("-c", PROGRAM, SIMULATED_GPU=str(card), SIMULATED_GPU_MEMORY=str(memory))
    planned, left_out, said = done.stdout.splitlines()
    assert planned == "['fprop conv3d(16->4, k3, 12x12x12) at batch 2']"
    assert left_out == "['fprop conv3d(4->16, k3, 96x96x96) at batch 2']"
    assert "1 of 2 kernels could not be measured and run torch's own convolution" in said
    # One sample of x, w and y, rounded up.
    tenths = ceil(10 * 4 * (4 * 96**3 + 16 * 4 * 27 + 16 * 96**3) / 2**20)
    assert f"at batch 1 needs {tenths / 10} MiB of operands" in said
    peaks = [int(path.read_text()) for path in memory.iterdir()]
    assert len(peaks) == 2  # this process's and the worker's
    assert sum(peaks) <= FRACTION * CARD
