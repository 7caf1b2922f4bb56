"""Units: what a person writes is read exactly, and what is printed can be read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import ConfigError, quoted
from ucudnn.units import format_bytes, format_ns, format_sizes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (8388608, 8388608),
        ("0", 0),
        ("17 B", 17),
        ("64MiB", 64 * 1024 * 1024),
        (" 64 mib ", 64 * 1024 * 1024),
        ("1.5GiB", 3 * 512 * 1024 * 1024),
        ("2.5KiB", 2560),
    ],
)
def test_reads_bytes(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", "MiB", "-1", "-1MiB", "64MB", "64 M", "1,5GiB", "1e6", "nan", "inf", "64MiB each"),
        *(2**63, "8589934592 GiB", "9" * 400),
    ],
)
def test_refuses_other_text(text: int | str) -> None:
    with pytest.raises(ConfigError, match="workspace must be a number of bytes such as") as caught:
        parse_bytes(text, "workspace")
    assert quoted(text) in str(caught.value)


@pytest.mark.parametrize("value", [-1, True, False, 1.5, None, b"1", [1]])
def test_refuses_other_values(value: Any) -> None:
    with pytest.raises(ConfigError, match="size must be a number of bytes"):
        parse_bytes(value)


@given(st.integers(0, 2**45))
def test_printed_bytes_suffice_and_are_read_back_within_rounding(count: int) -> None:
    read = parse_bytes(format_bytes(count))
    # A tenth of a KiB is no whole number of bytes, so reading may lose one.
    assert count - 1 <= read <= 1.1 * count
    assert read == count or count >= 1024


@pytest.mark.parametrize(
    ("count", "text"),
    [(1023, "1023 B"), (1024, "1 KiB"), (10 * 1024**2, "10 MiB"), (100 * 1024**3, "100 GiB")],
)
def test_prints_bytes_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.lists(st.integers(0, 2**45) | st.integers(2**30 - 3000, 2**30 + 3000), min_size=2))
def test_sizes_in_one_sentence_differ_and_keep_their_order(counts: list[int]) -> None:
    written = dict(zip(counts, format_sizes(*counts), strict=True))
    ordered = sorted(written)
    read = [parse_bytes(written[count]) for count in ordered]
    assert read == sorted(read)
    assert len(set(written.values())) == len(written)
    assert all(given - 1 <= found for given, found in zip(ordered, read, strict=True))


def test_only_sizes_that_would_read_alike_get_more_digits() -> None:
    mib = 1 << 20
    assert format_sizes(7 * mib + 1, 7 * mib + 99, 9 * mib) == ("7340033 B", "7340131 B", "9 MiB")
    assert format_sizes(mib - 1, mib) == ("1048575 B", "1 MiB")
    assert format_sizes(mib, mib) == ("1 MiB", "1 MiB")


@given(st.integers(1, 10**15))
def test_printed_time_has_three_digits_and_the_right_value(time_ns: int) -> None:
    number, unit = format_ns(time_ns).split()
    factor = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert float(number) * factor == pytest.approx(time_ns, rel=0.0051)
    digits = number.replace(".", "")
    if unit == "ns":
        assert number == str(time_ns)
    elif unit != "s" or len(digits) < 3:
        assert len(digits) == 3


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (9_999, "10.0 us"),
        (99_960, "100 us"),
        (999_700, "1.00 ms"),
        (52_000_000, "52.0 ms"),
        (61_000_000_000, "61.0 s"),
    ],
)
def test_prints_a_time_in_the_largest_unit(time_ns: int, text: str) -> None:
    assert format_ns(time_ns) == text


@pytest.mark.parametrize(("text", "meant"), [("64MB", "64MiB"), ("1.5 g", "1.5GiB")])
def test_decimal_units_are_refused_with_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        parse_bytes(text)
