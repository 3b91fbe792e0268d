"""`numerics`: the ranges of activations and gradients, and their losses in half precision."""
