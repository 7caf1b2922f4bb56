"""Random networks with segments compute what torch computes, or say that they do not.

For one seed of a failure: `python tests/layers/segment_trials.py 17`. It names what of the network
the difference needs; `--without block/hooked` leaves choices out.
"""

from __future__ import annotations

import pytest
from segment_trials import trials

# Each of these comes of at least this part of the networks, or little was tested.
LEAST = {
    "tried": 0.7,
    "compared": 0.7,
    "divided": 0.5,
    "divided at random": 0.03,
    "recomputed as a whole": 0.5,
    "recomputed in parts": 0.4,
    "selective": 0.5,
}
ON_PUSH = [range(start, start + 30) for start in range(0, 90, 30)]
NIGHTLY = [range(start, start + 100) for start in range(90, 3290, 100)]
CHUNKS = [
    *(pytest.param(one, id=f"{one[0]}-{one[-1]}", marks=pytest.mark.slow) for one in ON_PUSH),
    *(pytest.param(one, id=f"{one[0]}-{one[-1]}", marks=pytest.mark.nightly) for one in NIGHTLY),
]


@pytest.mark.parametrize("seeds", CHUNKS)
def test_no_difference_is_silent(seeds, one_thread):
    words, silent = trials(seeds)
    assert not silent, "\n".join(map(str, silent))
    few = {name: words[name] for name, part in LEAST.items() if words[name] < part * len(seeds)}
    assert not few, f"of {len(seeds)} networks: {dict(words)}"
