"""A custom training in one file: `python -m examples.custom`."""
