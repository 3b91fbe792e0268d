"""What the example scripts share: command line, run folder, metrics, plots, checkpoints, signals."""
