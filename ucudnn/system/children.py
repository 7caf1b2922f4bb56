"""Child processes that run this package by the interpreter of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_python(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a program in Python that finds the same packages as this process.

    >>> child = start_python("import ucudnn; print(ucudnn.__name__)", stdout=subprocess.PIPE)
    >>> child.communicate()[0].strip()
    b'ucudnn'

    Args:
        program: Python code.
        arguments: what it finds in `sys.argv[1:]`.
        environment: environment variables; default: those of this process.
        options: further arguments of `subprocess.Popen`.
    """
    # Whatever this process did to `sys.path`. An empty entry there stands for the current folder.
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        # -P: else `-c` puts the current folder first in sys.path.
        [sys.executable, "-P", "-c", program, *arguments],
        env={**(os.environ if environment is None else environment), "PYTHONPATH": paths},
        **options,
    )
