"""`parity`: whether half precision changes the result of a training run."""
