"""List what cuDNN could run each layer by on some device, and write it as a table."""

from __future__ import annotations

import csv
import os
from codecs import getwriter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucudnn.backends.cudnn.deviceless import Listing, list_configurations
from ucudnn.backends.cudnn.library import find_library
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import ConfigError
from ucudnn.problem import Problem
from ucudnn.system.files import replacing

# A file format that users read: names and order must stay.
COLUMNS = (
    *("name", "op", "dtype", "layout", "batch"),
    *("algorithm", "workspace_bytes", "mode", "rank", "notes"),
)


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Counts of the listed configurations.

    Args:
        rows: of the table; layers that are alike have rows each.
        candidates: distinct pairs of problem and algorithm.
        problems: distinct problems, with each micro-batch for itself.
        refused: why cuDNN has nothing, one sentence for each such problem.
        cudnn: version of the library.
        library: its file.
        device: whose candidates they are.
    """

    rows: int
    candidates: int
    problems: int
    refused: tuple[str, ...]
    cudnn: str
    library: str
    device: str

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.candidates} distinct candidates of {self.problems} problems "
            f"on {self.device}, by cuDNN {self.cudnn} ({self.library})"
        )


def enumerate_candidates(
    layers: Sequence[tuple[str, Problem]],
    profile: DeviceProfile,
    output: str | os.PathLike[str],
    batches: Iterable[int] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Enumeration:
    """List every configuration of every layer, op and micro-batch, and write a CSV file.

    Needs no GPU: cuDNN's own heuristics answer for the profile's device, in a child process. What
    PyTorch's rules on float32 rule out (`Configuration.is_allowed`) is left out.

    Args:
        layers: name and problem, as of `read_layers` or a trace.
        profile: the device.
        output: file to write; it appears when it is complete.
        batches: micro-batches; None: each layer's own and every power of two below it.
        on_progress: called with the problems done and all of them.

    Raises:
        ConfigError: the file cannot be written.
        UnsupportedError: cuDNN is missing, too old, does not know the device, or a machine without
            a driver has no C compiler.
    """
    target = Path(output)
    # Checked first: listing a whole network takes a while, and would be lost.
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"candidates are written to a file in a folder that exists, got {target}")
    sizes = None if batches is None else tuple(batches)
    chunks = {
        (name, problem): [problem.with_batch(size) for size in sizes or _powers(problem.batch)]
        for name, problem in layers
    }
    # Networks repeat layers, and layers share micro-batches: cuDNN is asked once for each problem.
    distinct = list(dict.fromkeys(chunk for found in chunks.values() for chunk in found))
    # Found once, so that the summary names the library that answered.
    library = find_library()
    listings: dict[Problem, Listing] = {}
    for done, listing in enumerate(list_configurations(distinct, profile, library), start=1):
        allowed = (one for one in listing.configurations if one.is_allowed(listing.problem))
        listings[listing.problem] = listing._replace(configurations=tuple(allowed))
        if on_progress is not None:
            on_progress(done, len(distinct))
    # Written by layer, though cuDNN was asked by distinct problem.
    rows = _write(
        target,
        ((name, listings[chunk]) for (name, _), found in chunks.items() for chunk in found),
    )
    return Enumeration(
        rows=rows,
        candidates=sum(len(listing.configurations) for listing in listings.values()),
        problems=len(distinct),
        refused=tuple(one.refusal for one in listings.values() if one.refusal),
        cudnn=listings[distinct[0]].cudnn_version,
        library=str(library),
        device=profile.name,
    )


def parse_batches(text: str) -> tuple[int, ...]:
    """Read micro-batch sizes.

    >>> parse_batches("32,1")
    (1, 32)

    Raises:
        ConfigError: they are no ints of at least 1, separated by commas.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ConfigError(
            f"batches must be ints of at least 1, separated by commas, such as 1,32; got {text!r}"
        )
    return tuple(sorted({int(word) for word in words}))


def _powers(batch: int) -> list[int]:
    """All powers of two below a batch, and the batch.

    >>> _powers(6), _powers(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    # (batch - 1).bit_length() is the number of powers of two below the batch.
    return [*(1 << power for power in range((batch - 1).bit_length())), batch]


def _write(path: Path, entries: Iterable[tuple[str, Listing]]) -> int:
    """Write the table, in place of the one that is there; return the number of rows."""
    rows = 0
    try:
        # Written beside the file and renamed, so that an interrupted run leaves the old table.
        with replacing(path) as stream:
            table = csv.writer(getwriter("utf-8")(stream), lineterminator="\n")
            table.writerow(COLUMNS)
            for name, listing in entries:
                problem = listing.problem
                key = (name, problem.op, problem.dtype, problem.layout, problem.batch)
                for one in listing.configurations:
                    # The comma separates the columns.
                    notes = "+".join(one.notes)
                    facts = (one.identity, one.workspace_bytes, one.mode, one.rank, notes)
                    table.writerow((*key, *facts))
                # Counted as written: layers that are alike repeat their candidates.
                rows += len(listing.configurations)
    except OSError as error:
        raise ConfigError(f"cannot write the candidates to {path}: {error.strerror}") from error
    return rows
