"""Shared code of the example scripts: command line, run folder, metrics, plots, checkpoints, signals."""
