"""Plans in data-parallel jobs: tuned together, agreed on before the first step, uneven shares.

    sharded.py    every rank measures a part, all end with one plan
    agreement.py  the same plan, versions and devices on all ranks, or an error that names them
    load_balancing.py more samples for faster ranks, with the gradient of the whole batch

The engine is torch.distributed: whatever started the ranks and made the default process group.
"""

from __future__ import annotations

from ucudnn.distributed.agreement import agree as agree
from ucudnn.distributed.agreement import broadcast as broadcast
from ucudnn.distributed.agreement import load as load
from ucudnn.distributed.load_balancing import Shares as Shares
from ucudnn.distributed.load_balancing import share as share
from ucudnn.distributed.load_balancing import step_times as step_times
from ucudnn.distributed.sharded import Patience as Patience
from ucudnn.distributed.sharded import tune as tune
from ucudnn.distributed.sharded import tune_problems as tune_problems

__all__ = [
    "tune",
    "tune_problems",
    "agree",
    "load",
    "broadcast",
    "share",
    "step_times",
    "Patience",
    "Shares",
]
