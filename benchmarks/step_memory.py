"""What a training step holds at each moment, by torch and within half of its peak: for a picture.

    python benchmarks/step_memory.py --out step_memory.json

The network is MONAI's SegResNet with two volumes of 48x48x48. Both steps are as they are foreseen;
the peaks are also measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from monai.networks.nets import SegResNet
from provenance import provenance

import ucudnn


def main() -> None:
    """Tune, and write both steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    network = SegResNet(3, 16, 1, 2, blocks_down=(1, 2, 2), blocks_up=(1, 1))
    plan = ucudnn.tune(
        network, torch.randn(2, 1, 48, 48, 48), ucudnn.Config(memory_budget="50%", time_budget_s=60)
    )
    memory = plan.memory
    found = {
        "made": provenance(),
        "held_bytes": memory.held_bytes,
        "peaks_bytes": [memory.torch_peak_bytes, memory.plan_peak_bytes],
        "divided": [str(one) for one in plan.segments],
        "steps": [
            [list(one) for one in memory.torch_blocks],
            [list(one) for one in memory.plan_blocks],
        ],
    }
    arguments.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
