"""Codecs: they write a flat gradient as a message of fewer bytes. Nothing is sent here.

A message is a uint8 tensor. Its size depends only on the gradient's size, so all ranks know it.
Error feedback (compression.py) adds what one message left out to the next gradient. Training then
converges if the error of a codec is always smaller than the gradient, by at least a fixed part
(Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ucudnn.errors import ConfigError, quoted

# Parts of a message begin at multiples of 8 bytes, so that they can be viewed as numbers.
_ALIGNED = 8
# `_largest` estimates a threshold from every 64th number, if more than 16 of these are above it.
_SAMPLED, _LEAST_RANK = 64, 16


class Codec(ABC):
    """Contract of codecs: `add_` adds an approximation of the gradient that was encoded.

    Attributes:
        has_feedback: True if what a message left out is added to the next gradient.
    """

    has_feedback: bool = True

    @abstractmethod
    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """Bytes of a message.

        Args:
            count: how many numbers the gradient has.
            itemsize: bytes of each number.
        """

    @abstractmethod
    def encode(self, flat: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Encode a gradient as a message.

        Args:
            flat: the gradient in one dimension, in float32 or float64.
            chance: generator for codecs that need random numbers; None: the default generator.
        """

    @abstractmethod
    def add_(self, message: Tensor, total: Tensor, alpha: int = 1) -> None:
        """Decode a message, and add it to a flat tensor of the gradient's size and dtype.

        Args:
            message: the result of `encode`.
            total: the tensor to which the decoded message is added.
            alpha: 1 to add the message, -1 to subtract it.
        """

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Decode a message into a new tensor like the gradient."""
        found = torch.zeros_like(like)
        self.add_(message, found)
        return found


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """Send the numbers of largest magnitude with their indices; leave out all others.

    >>> codec = TopK(density=0.5)
    >>> gradient = torch.tensor([3.0, -1.0, 0.5, -4.0])
    >>> codec.decode(codec.encode(gradient), gradient)
    tensor([ 3.,  0.,  0., -4.])

    At least one number of each parameter is sent. Sparse allreduce: Renggli et al., "SparCML",
    SC 2019; error feedback for it: Aji and Heafield, EMNLP 2017.

    Args:
        density: part of the numbers of each parameter that is sent.

    Raises:
        ConfigError: density is not above 0 and at most 1.
    """

    density: float

    def __post_init__(self) -> None:
        if not isinstance(self.density, float | int) or not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, got {quoted(self.density)}")

    def _kept(self, count: int) -> int:
        return ceil(self.density * count)

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """Bytes of a message."""
        kept = self._kept(count)
        return _aligned(kept * itemsize) + _aligned(kept * 4)

    def encode(self, flat: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Encode a gradient as a message."""
        del chance
        places = _largest(flat.abs(), self._kept(len(flat)))
        return _packed(flat[places], places.to(torch.int32))

    def add_(self, message: Tensor, total: Tensor, alpha: int = 1) -> None:
        """Decode a message, and add it to `total`."""
        kept = self._kept(len(total))
        values, rest = _cut(message, kept, total.dtype)
        places, _ = _cut(rest, kept, torch.int32)
        # Every index occurs only once, so the result does not depend on the order of the additions.
        total.index_add_(0, places, values, alpha=alpha)


@dataclass(frozen=True, slots=True)
class OneBit(Codec):
    """Send the sign of each number, and for each sign the mean of the numbers that have it.

    >>> codec = OneBit()
    >>> gradient = torch.tensor([3.0, -1.0, 1.0, -5.0])
    >>> codec.decode(codec.encode(gradient), gradient)
    tensor([ 2., -3.,  2., -3.])

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """Bytes of a message."""
        return _aligned(2 * itemsize) + _aligned(ceil(count / 8))

    def encode(self, flat: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Encode a gradient as a message."""
        del chance
        is_up = flat >= 0
        ups = is_up.sum()
        # Positive and negative numbers are summed separately, because the total minus one of the
        # two sums would lose digits.
        up, down = flat.clamp(min=0).sum(), flat.clamp(max=0).sum()
        means = torch.stack([up / ups.clamp(min=1), down / (len(flat) - ups).clamp(min=1)])
        return _packed(means, _pack(is_up.to(torch.uint8), 1))

    def add_(self, message: Tensor, total: Tensor, alpha: int = 1) -> None:
        """Decode a message, and add it to `total`."""
        (up, down), rest = _cut(message, 2, total.dtype)
        total.add_(torch.where(_unpack(rest, len(total), 1).bool(), up, down), alpha=alpha)


@dataclass(frozen=True, slots=True)
class Stochastic(Codec):
    """Round each number up or down to a few levels at random; on average, rounding adds no error.

    >>> codec = Stochastic(levels=1, clip=None)
    >>> gradient = torch.tensor([2.0, 0.0, -2.0])
    >>> codec.decode(codec.encode(gradient), gradient)
    tensor([ 2.,  0., -2.])

    With one level it is TernGrad (Wen et al., NeurIPS 2017), which clips the numbers first. With
    more levels it is QSGD (Alistarh et al., NeurIPS 2017), with the largest magnitude as scale and
    codes of fixed length. There is no error feedback, because with few levels the error fed back
    would grow from step to step.

    Args:
        levels: number of levels above zero, and also of those below zero; at most 127.
        clip: largest magnitude, as a multiple of the root mean square; None: no limit.

    Raises:
        ConfigError: a setting is out of range.
    """

    levels: int = 1
    clip: float | None = 2.5

    has_feedback = False

    def __post_init__(self) -> None:
        if type(self.levels) is not int or not 1 <= self.levels <= 127:
            raise ConfigError(f"levels must be an int from 1 to 127, got {quoted(self.levels)}")
        if self.clip is not None and not (isinstance(self.clip, float | int) and self.clip > 0):
            raise ConfigError(f"clip must be above 0, or None, got {quoted(self.clip)}")

    @property
    def _bits(self) -> int:
        # No code is divided between two bytes, so the number of its bits must divide 8.
        return next(bits for bits in (2, 4, 8) if 2 * self.levels < 1 << bits)

    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """Bytes of a message."""
        return _aligned(itemsize) + _aligned(ceil(count * self._bits / 8))

    def encode(self, flat: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Encode a gradient as a message."""
        if self.clip is not None:
            most = self.clip * flat.square().mean().sqrt()
            flat = flat.clamp(-most, most)
        scale = flat.abs().amax()
        # If all numbers are zero, the scale is zero, so it is clamped before the division.
        scaled = flat / scale.clamp(min=torch.finfo(flat.dtype).tiny) * self.levels
        random = torch.rand(flat.shape, generator=chance, dtype=flat.dtype, device=flat.device)
        # A number is rounded up with a probability equal to its fractional part, else down.
        low = scaled.floor()
        codes = low + (random < scaled - low) + self.levels
        # If the gradient is not finite, neither is the scale, and the scale makes the decoded
        # gradient not finite. So any valid codes will do.
        codes = codes.nan_to_num().clamp(0, 2 * self.levels).to(torch.uint8)
        return _packed(scale.reshape(1), _pack(codes, self._bits))

    def add_(self, message: Tensor, total: Tensor, alpha: int = 1) -> None:
        """Decode a message, and add it to `total`."""
        scale, rest = _cut(message, 1, total.dtype)
        codes = _unpack(rest, len(total), self._bits).to(total.dtype) - self.levels
        total.add_(codes.mul_(scale / self.levels), alpha=alpha)


@dataclass(frozen=True, slots=True)
class Half:
    """Add gradients up in bfloat16, which halves the bytes of float32 on any number of ranks.

    `Half` makes no messages, so it is no `Codec`. It does not use torch's own hooks for float16 and
    bfloat16: the one for bfloat16 needs NCCL, and with gloo both leave callbacks behind that may
    abort a process at its exit.

    >>> str(Half())
    'Half()'
    """


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of the largest magnitudes; NaN counts as larger than every number."""
    sample = magnitudes[::_SAMPLED]
    # On a CPU, it is several times as fast to choose only among the numbers above a threshold. The
    # threshold is such that about twice as many numbers as wanted are above it.
    rank = 2 * count // _SAMPLED
    if magnitudes.device.type == "cpu" and _LEAST_RANK < rank < len(sample) // 4:
        threshold = sample.topk(rank, sorted=False).values.min()
        # The test is not `>=`, so that NaN is among the candidates, too.
        candidates = (magnitudes < threshold).logical_not_().nonzero().flatten()
        if len(candidates) >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _packed(*parts: Tensor) -> Tensor:
    """Join the bytes of tensors; each tensor begins at a multiple of 8 bytes."""
    pieces = []
    for part in parts:
        data = part.contiguous().view(torch.uint8)
        pieces += [data, data.new_zeros(_aligned(len(data)) - len(data))]
    return torch.cat(pieces)


def _cut(message: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message into its first `count` numbers and the rest."""
    size = count * dtype.itemsize
    return message[:size].view(dtype), message[_aligned(size) :]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack several codes into each byte.

    The codes are divided into 8 / bits equal parts; byte i has the i-th code of each part.
    """
    per_byte = 8 // bits
    columns = ceil(len(codes) / per_byte)
    rows = torch.nn.functional.pad(codes, (0, per_byte * columns - len(codes))).view(per_byte, -1)
    found = rows[0].clone()
    for number in range(1, per_byte):
        found |= rows[number] << (bits * number)
    return found


def _unpack(data: Tensor, count: int, bits: int) -> Tensor:
    """Unpack the codes that `_pack` has packed."""
    per_byte = 8 // bits
    columns = ceil(count / per_byte)
    mask = (1 << bits) - 1
    rows = [(data[:columns] >> (bits * number)) & mask for number in range(per_byte)]
    return torch.cat(rows)[:count]
