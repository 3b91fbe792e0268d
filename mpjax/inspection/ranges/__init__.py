"""`numerics`: the ranges of activations and gradients, and what half precision would lose of them."""
