"""Entries as text files that people and other programs read and write."""
