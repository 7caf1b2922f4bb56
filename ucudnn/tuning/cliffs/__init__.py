"""Cliffs of torch's own convolutions: kernels that a split, an algorithm or a layout makes cheaper.

Each convolution of a step is timed as torch runs it, and beside it whatever computes the same: its
micro-batches, other algorithms, channels-last operands, another dtype. A cliff is where one of them
is far cheaper; its kind says what the difference is due to. Where a step can be run, it decides: a
kernel finds its memory and the caches in another state there than by itself.
"""

from ucudnn.tuning.cliffs.found import Cliff, Cliffs
from ucudnn.tuning.cliffs.search import find_cliffs, large_blocks_stay

__all__ = ["Cliff", "Cliffs", "find_cliffs", "large_blocks_stay"]
