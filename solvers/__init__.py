"""Solvers: the best split of a batch, division of memory, and buckets of gradients; pure."""

from __future__ import annotations

from ucudnn.solvers._base import Division as Division
from ucudnn.solvers._base import Item as Item
from ucudnn.solvers.collectives import Link as Link
from ucudnn.solvers.division import divide as divide
from ucudnn.solvers.load_balancing import balance as balance
from ucudnn.solvers.overlap import Buckets as Buckets
from ucudnn.solvers.overlap import Line as Line
from ucudnn.solvers.overlap import bucket as bucket
from ucudnn.solvers.overlap import finish as finish
from ucudnn.solvers.overlap import fit as fit
from ucudnn.solvers.reuse import reuse as reuse
from ucudnn.solvers.reuse_table import ReuseTable as ReuseTable
from ucudnn.solvers.reuse_table import WalkEntry as WalkEntry
from ucudnn.solvers.segments import Node as Node
from ucudnn.solvers.segments import Option as Option
from ucudnn.solvers.segments import SegmentTable as SegmentTable
from ucudnn.solvers.segments import segment as segment

__all__ = [
    "Buckets",
    "Division",
    "Item",
    "Line",
    "Link",
    "Node",
    "Option",
    "ReuseTable",
    "SegmentTable",
    "WalkEntry",
    "balance",
    "bucket",
    "divide",
    "finish",
    "fit",
    "reuse",
    "segment",
]
