"""`numerics`: the ranges of activations and gradients, and what half precision loses of them."""
