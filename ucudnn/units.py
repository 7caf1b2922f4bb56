"""Units as people write them: bytes ("64MiB") and nanoseconds ("1.2 ms")."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Annotated

from msgspec import Meta

from ucudnn.errors import ConfigError, quoted
from ucudnn.verdict import LEAST_ROUNDS

# The smallest number that is refused: sizes of tensors and numbers in a cache are 64-bit integers.
TOO_LARGE = 2**63
# Types of numbers in files, which `msgspec.convert` checks.
Count = Annotated[int, Meta(ge=0, le=TOO_LARGE - 1)]
Positive = Annotated[int, Meta(gt=0, le=TOO_LARGE - 1)]
Ratio = Annotated[float, Meta(gt=0, le=sys.float_info.max)]  # no nan, no infinity

_BYTES_PER_UNIT = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | str, name: str = "size") -> int:
    """Read a number of bytes as a person writes it: an int, or text with B, KiB, MiB or GiB.

    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes("1.5 KiB")
    1536
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < TOO_LARGE:
        return text
    match = _BYTES_PATTERN.fullmatch(text) if isinstance(text, str) else None
    factor = _BYTES_PER_UNIT.get(match[2].upper()) if match else None
    # Text that is not a size is given a size that is too large, so that both raise the same error.
    size = float(match[1]) * factor if match and factor else TOO_LARGE
    if size >= TOO_LARGE:
        decimal = match is not None and match[2].upper() in ("KB", "MB", "GB", "K", "M", "G")
        meant = f"; did you mean {match[1]}{match[2][0].upper()}iB?" if match and decimal else ""
        raise ConfigError(
            f"{name} must be a number of bytes such as 8388608, '64MiB' or '1.5GiB', got "
            f"{quoted(text)}{meant}"
        )
    return int(size)


def tightest(*limits: int | None) -> int | None:
    """The smallest of some limits; None stands for no limit.

    >>> tightest(9, None, 4), tightest(None)
    (4, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)


def format_bytes(count: int) -> str:
    """Write a number of bytes for a person, in the largest unit in which it is at least 1.

    The number is rounded up, so that a limit set to the written size suffices.

    >>> format_bytes(9 << 20), format_bytes(1537), format_bytes(0)
    ('9 MiB', '1.6 KiB', '0 B')
    """
    (text,) = format_sizes(count)
    return text


def format_sizes(*counts: int) -> tuple[str, ...]:
    """Write the sizes that one sentence compares, like `format_bytes`; different sizes differ.

    Where one digit after the point is too few to tell sizes apart, they get more, or all bytes. A
    size that is written exactly stays as it is.

    >>> format_sizes(7_440_000, 7_438_000, 1 << 20, (1 << 20) - 1)
    ('7.096 MiB', '7.094 MiB', '1 MiB', '1048575 B')
    """
    texts = {count: f"{count} B" for count in counts}
    unclear = set(counts)
    for digits in (1, 2, 3):
        rounded = {count: _rounded(count, 10**digits) for count in set(counts)}
        read = Counter(number * factor for number, factor, _ in rounded.values())
        for count in [*unclear]:
            number, factor, unit = rounded[count]
            is_exact = number * factor == count * 10**digits
            if is_exact or read[number * factor] == 1:
                texts[count] = f"{number // 10**digits}.{number % 10**digits:0{digits}}".rstrip("0")
                texts[count] = f"{texts[count].removesuffix('.')} {unit}"
                unclear.remove(count)
    return tuple(texts[count] for count in counts)


def _rounded(count: int, parts: int) -> tuple[int, int, str]:
    """A size, rounded up to a whole number of `1 / parts` of its unit; the unit in bytes; its name.

    The number is computed in integers, because with floats a limit could be rounded down.
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return -(-parts * count // factor), factor, unit
    return parts * count, 1, "B"


def format_ratio(ratio: float, low: float, high: float, rounds: int = LEAST_ROUNDS) -> str:
    """Write a ratio for a person, with its interval if there were enough rounds to know one.

    >>> format_ratio(0.91, 0.9, 0.9249), format_ratio(0.91, 0.91, 0.91, rounds=1)
    ('0.91 (0.90 to 0.92)', '0.91')
    """
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})" if rounds >= LEAST_ROUNDS else f"{ratio:.2f}"


def format_ns(time_ns: float) -> str:
    """Write a time in nanoseconds for a person, with three significant digits.

    >>> format_ns(1_234_000), format_ns(52_000_000), format_ns(4_200)
    ('1.23 ms', '52.0 ms', '4.20 us')
    """
    # Each bound below is where rounding to the digits that are shown would give one more digit
    # before the point: 9.995 would become 10.00, so it is shown as 10.0.
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        value = time_ns / factor
        if value >= 0.9995:  # what rounds to 1.00
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{time_ns:.0f} ns"
