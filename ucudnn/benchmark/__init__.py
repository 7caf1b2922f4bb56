"""How times are taken: the protocol, and the statistics that judge them."""

from __future__ import annotations
