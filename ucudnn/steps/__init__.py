"""Whole steps: foresee and run them on copies of a model, divide them, and judge plans by them."""
