"""List the engines by which cuDNN could run each layer on some device, as a table."""

from __future__ import annotations

import csv
import os
from codecs import getwriter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucudnn.backends.cudnn.api import find_library
from ucudnn.backends.cudnn.offline import Listing, list_configurations
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
        rows: number of rows of the table; equal layers have a row each.
        candidates: number of distinct pairs of problem and algorithm.
        problems: number of distinct problems; each micro-batch is a problem.
        refused: for each problem without configurations, the reason in one sentence.
        cudnn: version of the library.
        library: file of the library.
        device: the device of the candidates.
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

    It needs no GPU: cuDNN's own heuristics answer for the profile's device, in a child process.
    Configurations that PyTorch's rules on float32 forbid are left out (`Configuration.is_allowed`).

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
    chunks = _chunks(layers, None if batches is None else tuple(batches))
    # Networks repeat layers, and layers share micro-batches: cuDNN is asked once for each problem.
    distinct = list(dict.fromkeys(chunk for _, chunk in chunks))
    # Found once, so that the summary names the library that answered.
    library = find_library()
    listings = _allowed_listings(distinct, profile, library, on_progress)
    # Written by layer, though cuDNN was asked by distinct problem.
    rows = _write(target, ((name, listings[chunk]) for name, chunk in chunks))
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
        ConfigError: the text is not a list of ints of at least 1, separated by commas.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ConfigError(
            f"batches must be ints of at least 1, separated by commas, such as 1,32; got {text!r}"
        )
    return tuple(sorted({int(word) for word in words}))


def _chunks(
    layers: Iterable[tuple[str, Problem]], sizes: tuple[int, ...] | None
) -> list[tuple[str, Problem]]:
    """Every micro-batch of every layer, by the layer's name; a layer that is listed twice once."""
    return [
        (name, problem.with_batch(size))
        for name, problem in dict.fromkeys(layers)
        for size in sizes or _powers(problem.batch)
    ]


def _allowed_listings(
    problems: Sequence[Problem],
    profile: DeviceProfile,
    library: Path,
    on_progress: Callable[[int, int], None] | None,
) -> dict[Problem, Listing]:
    """The configurations of each problem that PyTorch's rules on float32 allow."""
    listings: dict[Problem, Listing] = {}
    for done, listing in enumerate(list_configurations(problems, profile, library), start=1):
        allowed = (one for one in listing.configurations if one.is_allowed(listing.problem))
        listings[listing.problem] = listing._replace(configurations=tuple(allowed))
        if on_progress is not None:
            on_progress(done, len(problems))
    return listings


def _powers(batch: int) -> list[int]:
    """All powers of two below a batch, and the batch.

    >>> _powers(6), _powers(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    # (batch - 1).bit_length() is the number of powers of two below the batch.
    return [*(1 << power for power in range((batch - 1).bit_length())), batch]


def _write(path: Path, entries: Iterable[tuple[str, Listing]]) -> int:
    """Write the table, replacing an existing one; return the number of rows."""
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
