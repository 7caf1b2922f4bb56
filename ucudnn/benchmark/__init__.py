"""Measuring of candidates and of whole calls: timing, the accuracy check and the statistics."""
