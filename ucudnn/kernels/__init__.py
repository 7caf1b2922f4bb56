"""Tuning of kernels: choose what to measure, in which order, and decide the plan of each one."""
