"""Solvers: the best split of a batch and the best division of memory, over integers (ns, bytes)."""

from __future__ import annotations

from ucudnn.solvers._base import Division as Division
from ucudnn.solvers._base import Item as Item
from ucudnn.solvers.division import divide as divide
from ucudnn.solvers.load_balancing import balance as balance
from ucudnn.solvers.reuse import reuse as reuse
from ucudnn.solvers.segments import Node as Node
from ucudnn.solvers.segments import Option as Option
from ucudnn.solvers.segments import SegmentTable as SegmentTable
from ucudnn.solvers.segments import segment as segment
from ucudnn.solvers.table import ReuseTable as ReuseTable
from ucudnn.solvers.table import WalkEntry as WalkEntry

__all__ = [
    "Division",
    "Item",
    "Node",
    "Option",
    "ReuseTable",
    "SegmentTable",
    "WalkEntry",
    "balance",
    "divide",
    "reuse",
    "segment",
]
