"""Whole steps of a model timed by torch in the ways a user has, and by plans."""
