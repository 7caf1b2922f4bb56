"""System: files, child processes, locks that survive a fork, tables of text."""
