"""Data-parallel jobs: plans on which ranks agree, the start of ranks, the exchange of gradients.

    startup.py     join the job, whichever of torchrun, MPI and Slurm started this rank
    tuning.py      tune in all ranks; each rank measures a part of the kernels
    agreement.py   check that ranks agree on plan, versions and devices, or name ranks that differ
    rendezvous.py  let ranks find each other and exchange values through a key-value store
    sharding.py    modules of FSDP2 as plain ones, to plan them
    launching.py   start several ranks for each GPU, or for the processor
    counting.py    count samples, and find the number of ranks that computes most samples per second
    two_level.py   average gradients among the ranks of a device first, then across devices
    exchange_times.py   `advise`: measure the link, whole steps, and when gradients are ready
    exchange_advice.py  choose a way to exchange gradients from these measured times
    averaging.py   ranks that do not wait for each exchange: elastic averaging, delayed gradients
    codecs.py      write a gradient as a message of fewer bytes
    compression.py a communication hook for DDP that sends such messages, with error feedback

Ranks send plans and measurements through the store of torch.distributed's default process group,
whatever launched the ranks. Names are imported at their first use (PEP 562), so a job that only
loads a plan does not import the tuner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from ucudnn.distributed.agreement import agree as agree
    from ucudnn.distributed.agreement import broadcast as broadcast
    from ucudnn.distributed.agreement import load as load
    from ucudnn.distributed.averaging import ElasticAverager as ElasticAverager
    from ucudnn.distributed.averaging import delay as delay
    from ucudnn.distributed.codecs import Half as Half
    from ucudnn.distributed.codecs import OneBit as OneBit
    from ucudnn.distributed.codecs import Stochastic as Stochastic
    from ucudnn.distributed.codecs import TopK as TopK
    from ucudnn.distributed.compression import Compression as Compression
    from ucudnn.distributed.compression import compress as compress
    from ucudnn.distributed.counting import count as count
    from ucudnn.distributed.exchange_times import advise as advise
    from ucudnn.distributed.startup import Job as Job
    from ucudnn.distributed.startup import init as init
    from ucudnn.distributed.tuning import tune as tune
    from ucudnn.distributed.two_level import reduce_by_device as reduce_by_device

# The same names as above: type checkers read the imports, `__getattr__` reads this mapping.
_MODULE_BY_NAME = {
    "Compression": "compression",
    "ElasticAverager": "averaging",
    "Half": "codecs",
    "Job": "startup",
    "OneBit": "codecs",
    "Stochastic": "codecs",
    "TopK": "codecs",
    "advise": "exchange_times",
    "agree": "agreement",
    "broadcast": "agreement",
    "compress": "compression",
    "count": "counting",
    "delay": "averaging",
    "init": "startup",
    "load": "agreement",
    "reduce_by_device": "two_level",
    "tune": "tuning",
}
__all__ = list(_MODULE_BY_NAME)


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(import_module(f"ucudnn.distributed.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module 'ucudnn.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_BY_NAME])
