"""Solvers: which micro-batches, and which share of the memory. Pure, over integers (ns, bytes)."""

from __future__ import annotations

from ucudnn.solvers._base import Item as Item
from ucudnn.solvers.reuse import reuse as reuse
from ucudnn.solvers.table import ReuseTable as ReuseTable
from ucudnn.solvers.table import WalkEntry as WalkEntry

__all__ = ["Item", "ReuseTable", "WalkEntry", "reuse"]
