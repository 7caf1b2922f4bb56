"""Environment variables by which a process tells those that it starts what they take part in.

None of them is a setting of tuning; those are in `ucudnn.config`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ucudnn.errors import ConfigError

# Files that an unchanged script is run with.
_PLAN, _RECORD = STARTUP_VARIABLES = ("UCUDNN_PLAN", "UCUDNN_RECORD")
# Facts that `ucudnn launch` tells its ranks: how many share a device, which is part of the
# conditions of every measurement, and where they count samples in a trial.
RANKS_PER_DEVICE, PROGRESS = LAUNCH_VARIABLES = ("UCUDNN_RANKS_PER_DEVICE", "UCUDNN_PROGRESS")


class Startup(NamedTuple):
    """Files that a process takes part in from its start, without a line of code.

    Args:
        plan: plan to follow, None for none.
        record: table of layers to write the convolutions of the process to, None for none.
    """

    plan: str | None = None
    record: str | None = None

    def __bool__(self) -> bool:
        """True if there is one."""
        return self.plan is not None or self.record is not None


def startup() -> Startup:
    """The files that UCUDNN_PLAN and UCUDNN_RECORD name.

    >>> startup()
    Startup(plan=None, record=None)
    """
    # Empty counts as unset, as for settings.
    return Startup(os.environ.get(_PLAN) or None, os.environ.get(_RECORD) or None)


def set_startup(files: Startup) -> None:
    """Hand files down to the processes that this one starts, and take others away from them."""
    for name, value in ((_PLAN, files.plan), (_RECORD, files.record)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def environment_without_startup() -> dict[str, str]:
    """The environment for a process that measures: what it times must be torch's own.

    >>> "UCUDNN_PLAN" in environment_without_startup()
    False
    """
    return {name: value for name, value in os.environ.items() if name not in (_PLAN, _RECORD)}


def ranks_per_device() -> int:
    """Number of processes that share this one's device, as `ucudnn launch` tells them.

    >>> ranks_per_device()
    1

    Raises:
        ConfigError: the variable holds no number above 0.
    """
    text = os.environ.get(RANKS_PER_DEVICE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{RANKS_PER_DEVICE} must be a number above 0, got {text!r}")
    return int(text)


def rank_variables(
    ranks_per_device: int, limit_bytes: int | None = None, progress: str | None = None
) -> dict[str, str]:
    """Variables that a launched rank gets from `ucudnn launch`.

    >>> rank_variables(2, limit_bytes=1024)
    {'UCUDNN_RANKS_PER_DEVICE': '2', 'UCUDNN_WORKSPACE_LIMIT': '1024'}

    Args:
        ranks_per_device: number of ranks that share its device.
        limit_bytes: its workspace limit, where the script sets none.
        progress: folder where it counts samples.
    """
    optional = {"UCUDNN_WORKSPACE_LIMIT": limit_bytes, PROGRESS: progress}
    given = {name: str(value) for name, value in optional.items() if value is not None}
    return {RANKS_PER_DEVICE: str(ranks_per_device), **given}


def progress_folder() -> str | None:
    """Folder where ranks count their samples, None outside of a trial.

    >>> progress_folder() is None
    True
    """
    return os.environ.get(PROGRESS)


def share_device(ranks: int) -> None:
    """Note, for this process and those that it starts, how many ranks share its device.

    Args:
        ranks: their number.
    """
    os.environ[RANKS_PER_DEVICE] = str(ranks)
