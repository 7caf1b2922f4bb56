"""System: files written whole, locks that survive a fork, things that close."""
