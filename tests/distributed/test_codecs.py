"""Codecs against references: the right numbers arrive, and what is random is right on average."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from ucudnn.distributed.codecs import Codec, OneBit, Stochastic, TopK
from ucudnn.errors import ConfigError

CODECS = [
    *(TopK(0.01), TopK(0.5), TopK(1)),
    *(OneBit(), Stochastic(), Stochastic(7), Stochastic(127, None)),
]
DTYPES = [torch.float32, torch.float64]
COUNTS = [1, 2, 7, 8, 9, 64, 1000]


def gradient(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_have_the_size_that_is_stated_and_zeros_stay_zeros(codec, dtype):
    for count in COUNTS:
        zeros = torch.zeros(count, dtype=dtype)
        assert torch.equal(codec.decode(codec.encode(zeros), zeros), zeros)
        message = codec.encode(gradient(count, dtype))
        assert message.dtype == torch.uint8
        assert len(message) == codec.size_bytes(count, dtype.itemsize)
        assert len(message) % 8 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1])
def test_top_k_sends_what_numpy_finds(density, dtype):
    whole = gradient(1000, dtype)
    codec = TopK(density)
    sent = codec.decode(codec.encode(whole), whole)
    kept = round(density * 1000)
    largest = np.argpartition(-whole.abs().numpy(), kept - 1)[:kept]
    assert sorted(sent.nonzero().flatten().tolist()) == sorted(largest.tolist())
    # What is sent and what is left are the gradient, bit by bit.
    assert torch.equal(sent + (whole - sent), whole)
    assert torch.equal(sent[largest], whole[largest])


@pytest.mark.parametrize("repeated", [1, 97])
def test_top_k_of_many_numbers_sends_the_largest(repeated):
    # So many that candidates are found by a threshold, also where the sample misses the large ones.
    whole = gradient(1 << 17).sort().values[torch.arange(1 << 17) // repeated]
    sent = TopK(0.01).decode(TopK(0.01).encode(whole), whole)
    kept = TopK(0.01)._kept(len(whole))
    assert int(sent.count_nonzero()) == kept
    expected = np.sort(whole.abs().numpy())[-kept:]
    assert np.array_equal(np.sort(sent.abs()[sent != 0].numpy()), expected)
    whole[77] = float("nan")
    assert TopK(0.01).decode(TopK(0.01).encode(whole), whole).isnan().sum() == 1


@pytest.mark.parametrize("count", [2, 9, 1000])
def test_one_bit_sends_the_means_of_both_signs(count):
    whole = gradient(count)
    sent = OneBit().decode(OneBit().encode(whole), whole)
    left = whole - sent
    for sign in (whole >= 0, whole < 0):
        if sign.any():
            assert torch.allclose(sent[sign], whole[sign].mean().expand(int(sign.sum())))
            assert left[sign].sum().abs() < 1e-12 * count


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_stochastic_levels_are_unbiased_and_bounded(levels):
    codec, whole = Stochastic(levels, None), gradient(16)
    chance = torch.Generator().manual_seed(1)
    draws = torch.stack([codec.decode(codec.encode(whole, chance), whole) for _ in range(4000)])
    step = whole.abs().max() / levels
    # Five standard errors of the mean of 4000; a variance is at most a quarter of a step squared.
    assert (draws.mean(0) - whole).abs().max() < 5 * step / 2 / 4000**0.5
    assert draws.var(0).max() <= 1.001 * step**2 / 4
    assert torch.allclose(draws / step, (draws / step).round(), atol=1e-9)


def test_clipping_limits_to_deviations():
    whole = torch.zeros(1000)
    whole[0] = 100.0
    codec = Stochastic(1, 2.5)
    deviation = 100 / 1000**0.5
    found = codec.decode(codec.encode(whole), whole)
    assert found[0] == pytest.approx(2.5 * deviation)
    assert not found[1:].any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_arrives(codec, bad):
    whole = gradient(100, torch.float32)
    whole[42] = bad
    assert not codec.decode(codec.encode(whole), whole).isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "density must be above 0 and at most 1, got 0"),
        (lambda: TopK(1.5), "density must be above 0 and at most 1, got 1.5"),
        (lambda: TopK(float("nan")), "density must be .* got nan"),
        (lambda: TopK("1%"), "density must be .* got '1%'"),
        (lambda: Stochastic(0), "levels must be an int from 1 to 127, got 0"),
        (lambda: Stochastic(128), "levels must be an int from 1 to 127, got 128"),
        (lambda: Stochastic(1.0), "levels must be an int from 1 to 127, got 1.0"),
        (lambda: Stochastic(1, 0), "clip must be above 0, or None, got 0"),
        (lambda: Stochastic(1, float("nan")), "clip must be above 0, or None, got nan"),
    ],
)
def test_codecs_refuse(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_messages_are_smaller_by_the_ratio_that_is_stated():
    count = 1 << 20
    ratios: dict[Codec, Fraction] = {
        TopK(1 / 128): Fraction(2, 128),
        OneBit(): Fraction(1, 32),
        Stochastic(1): Fraction(2, 32),
        Stochastic(7): Fraction(4, 32),
        Stochastic(127): Fraction(8, 32),
    }
    for codec, ratio in ratios.items():
        assert codec.size_bytes(count) == pytest.approx(float(ratio) * 4 * count, rel=1e-4)
