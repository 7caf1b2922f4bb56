"""Envelope of every HDF5 file: its length and digest, which show damage before libhdf5 opens it.

The first 512 bytes are an HDF5 user block, which HDF5 tools skip:

    ucudnn-cache 1
    bytes 24184
    sha256 6b1c...
    (zeros)

The digest covers the first line and everything after the block. Later versions of the format keep
this block, so that their files can be told from damaged ones.
"""

from __future__ import annotations

import re
from hashlib import sha256

from ucudnn.errors import CacheError

VERSION = 1
ENVELOPE_BYTES = 512
FORMAT = "ucudnn-cache"
# Enough of a file for `has_envelope`: the attributes of the root stand near the beginning.
HEAD_BYTES = 1 << 16
_MARK = FORMAT.encode()
_FIRST_LINE = re.compile(rb"ucudnn-cache ([1-9]\d{0,8})\n")
_HDF5 = b"\x89HDF\r\n\x1a\n"


class DamagedError(CacheError):
    """A file that differs from what was written, or that no cache has written."""


class NewerError(CacheError):
    """A sound file in the format of a later version."""


def has_envelope(head: bytes) -> bool:
    """True for the first bytes of a file that only a cache can have written, damaged or not.

    >>> has_envelope(wrap(b"anything")), has_envelope(bytes(600)), has_envelope(b"")
    (True, False, False)

    Args:
        head: up to `HEAD_BYTES` from the beginning of the file.
    """
    # Where the envelope was destroyed, the HDF5 data behind it may still have the attribute that a
    # cache gives its root.
    is_hdf5 = head[ENVELOPE_BYTES : ENVELOPE_BYTES + len(_HDF5)] == _HDF5
    return head.startswith(_MARK) or (is_hdf5 and _MARK in head[ENVELOPE_BYTES:])


def wrap(data: bytes, version: int = VERSION) -> bytes:
    """The contents of a file: HDF5 data behind its envelope."""
    return _envelope(data, version) + data


def _envelope(data: bytes | memoryview, version: int) -> bytes:
    first = f"{FORMAT} {version}\n".encode()
    digest = sha256(first)
    digest.update(data)
    return (first + f"bytes {len(data)}\nsha256 {digest.hexdigest()}\n".encode()).ljust(
        ENVELOPE_BYTES, b"\0"
    )


def verify(content: bytes) -> None:
    """Compare a file with its envelope, before HDF5 reads it.

    >>> verify(wrap(b"anything"))

    Raises:
        DamagedError: it is not what was written.
        NewerError: it is sound, and of a later version.
    """
    first = _FIRST_LINE.match(content)
    if not first:
        raise DamagedError("it does not begin like a file of this cache")
    version, data = int(first[1]), memoryview(content)[ENVELOPE_BYTES:]
    if content[:ENVELOPE_BYTES] != _envelope(data, version):
        raise DamagedError("its checksum does not agree with its contents")
    # Only now: a damaged file must not pass for one of a later version, which is never set aside.
    if version > VERSION:
        raise NewerError(f"it has format version {version}, this ucudnn reads up to {VERSION}")
