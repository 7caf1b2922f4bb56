"""Solvers of splits, divisions of memory, segments and buckets; they compute and never measure."""

from __future__ import annotations

from ucudnn.solvers._base import Division, Item
from ucudnn.solvers.collectives import Link
from ucudnn.solvers.division import divide
from ucudnn.solvers.load_balancing import balance
from ucudnn.solvers.overlap import Buckets, Contention, Curve, bucket, overlap
from ucudnn.solvers.reuse import reuse
from ucudnn.solvers.reuse_table import ReuseTable, WalkEntry
from ucudnn.solvers.segments import Node, Option, OuterOption, SegmentTable, segment

__all__ = [
    "Buckets",
    "Contention",
    "Curve",
    "Division",
    "Item",
    "Link",
    "Node",
    "Option",
    "OuterOption",
    "ReuseTable",
    "SegmentTable",
    "WalkEntry",
    "balance",
    "bucket",
    "divide",
    "overlap",
    "reuse",
    "segment",
]
