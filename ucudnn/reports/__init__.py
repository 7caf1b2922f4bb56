"""Reports: plans as text, as a page and beside each other."""
