"""System: atomic file writes, locks that work after a fork, objects that are closed."""
