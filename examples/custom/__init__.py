"""A training of one's own in one file: `python -m examples.custom`."""
