"""Envelope of every HDF5 file: length and checksum, so that damage is seen before libhdf5 opens it.

The first 512 bytes are an HDF5 user block, which HDF5 tools skip:

    ucudnn-cache 1
    bytes 24184
    sha256 6b1c...
    (zeros)

The digest is of the first line and of everything after the block. This block stays the same in
later versions, so that a later version is told from a damaged file.
"""

from __future__ import annotations

import re
from hashlib import sha256

from ucudnn.errors import CacheError

VERSION = 1
FRAME_BYTES = 512
FORMAT = "ucudnn-cache"
# Enough of a file for `was_framed`: the attributes of the root stand near the beginning.
HEAD_BYTES = 1 << 16
_MARK = FORMAT.encode()
_FIRST_LINE = re.compile(rb"ucudnn-cache ([1-9]\d{0,8})\n")
_HDF5 = b"\x89HDF\r\n\x1a\n"


class DamagedError(CacheError):
    """A file that is not as it was written, or was never one of a cache."""


class NewerError(CacheError):
    """A sound file in a format of a later version."""


def was_framed(head: bytes) -> bool:
    """True for the first bytes of a file that only a cache can have written, damaged or not.

    Either the frame's first word is there, or, behind a frame that was destroyed, HDF5 data with
    the attribute that a cache gives its root.

    >>> was_framed(framed(b"anything")), was_framed(bytes(600)), was_framed(b"")
    (True, False, False)

    Args:
        head: up to `HEAD_BYTES` from the beginning of the file.
    """
    is_behind_a_block = head[FRAME_BYTES : FRAME_BYTES + len(_HDF5)] == _HDF5
    return head.startswith(_MARK) or (is_behind_a_block and _MARK in head[FRAME_BYTES:])


def framed(image: bytes, version: int = VERSION) -> bytes:
    """HDF5 data with its frame, as it stands in a file."""
    return _frame(image, version) + image


def _frame(image: bytes | memoryview, version: int) -> bytes:
    first = f"{FORMAT} {version}\n".encode()
    digest = sha256(first)
    digest.update(image)
    return (first + f"bytes {len(image)}\nsha256 {digest.hexdigest()}\n".encode()).ljust(
        FRAME_BYTES, b"\0"
    )


def verify(data: bytes) -> None:
    """Hold a file against its frame, before HDF5 looks at it.

    >>> verify(framed(b"anything"))

    Raises:
        DamagedError: it is not what was written.
        NewerError: it is, by a later version.
    """
    first = _FIRST_LINE.match(data)
    if not first:
        raise DamagedError("it does not begin like a file of this cache")
    version, image = int(first[1]), memoryview(data)[FRAME_BYTES:]
    if data[:FRAME_BYTES] != _frame(image, version):
        raise DamagedError("its checksum does not agree with its contents")
    if version > VERSION:
        raise NewerError(f"it has format version {version}, this ucudnn reads up to {VERSION}")
