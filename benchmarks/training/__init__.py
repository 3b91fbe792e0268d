"""Speed and memory of training steps, model by model: `python -m benchmarks.training`."""
