"""Tuning: choose which candidates to measure, in which order, and decide the plan from them."""
