"""Timing: the protocol, and the statistics that judge times."""

from __future__ import annotations
