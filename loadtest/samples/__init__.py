"""Small traces of our own making, one for each format: ``python -m loadtest.samples.generate``."""
