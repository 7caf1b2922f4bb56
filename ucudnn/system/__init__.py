"""Modules for files, child processes, locks that survive a fork, and tables of text."""
