"""Let torch see a simulated GPU in every process that has this folder on its path."""

from __future__ import annotations

import os

if "SIMULATED_GPU" in os.environ:
    from simulated_gpu import install

    install()
