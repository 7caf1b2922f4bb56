"""`python -m ucudnn`: the command line."""

from __future__ import annotations

from ucudnn.cli import main

main()
