"""Timing of single candidates: the protocol, the accuracy check and the statistics."""
