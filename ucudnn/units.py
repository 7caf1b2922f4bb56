"""Units as people write them: bytes ("64MiB") and nanoseconds ("1.2 ms")."""

from __future__ import annotations

# Sizes of tensors, and the numbers in a cache, are 64-bit integers.
TOO_LARGE = 2**63


def format_bytes(count: int) -> str:
    """Write a number of bytes for a person, in the largest unit that keeps it at least 1.

    The number is rounded up, so that a limit of the size written suffices.

    >>> format_bytes(9 << 20), format_bytes(1537), format_bytes(0)
    ('9 MiB', '1.6 KiB', '0 B')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            # In integers, because a float could round a limit down.
            tenths = -(-10 * count // factor)
            return f"{tenths // 10}.{tenths % 10}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


def format_ns(time_ns: float) -> str:
    """Write a time in nanoseconds for a person, with three significant digits.

    >>> format_ns(1_234_000), format_ns(52_000_000), format_ns(4_200)
    ('1.23 ms', '52.0 ms', '4.20 us')
    """
    # The bounds below are where rounding to three digits adds one before the point.
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        value = time_ns / factor
        if value >= 0.9995:  # what rounds to 1.00
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{time_ns:.0f} ns"
