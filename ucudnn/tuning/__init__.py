"""Many candidates become a plan: which to measure, in which order, and what to decide from them."""
