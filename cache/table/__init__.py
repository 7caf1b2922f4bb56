"""Measurements as columns: the schema, rows of numpy tables, and tables with one row per key."""
