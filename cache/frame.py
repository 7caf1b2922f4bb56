"""What stands before the HDF5 data of every file, so that damage is seen before libhdf5 opens it.

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
_FIRST_LINE = re.compile(rb"ucudnn-cache ([1-9]\d{0,8})\n")


class DamagedError(CacheError):
    """A file that is not as it was written, or was never one of a cache."""


class NewerError(CacheError):
    """A sound file in a format of a later version."""


def framed(image: bytes, version: int = VERSION) -> bytes:
    """HDF5 data with its frame, as it stands in a file."""
    return _frame(image, version) + image


def _frame(image: bytes | memoryview, version: int) -> bytes:
    first = f"ucudnn-cache {version}\n".encode()
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
