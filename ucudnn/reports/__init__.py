"""Reports: a plan as text or as an HTML page, and comparisons of two plans."""
