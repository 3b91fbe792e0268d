"""`watch`: statistics of activations and gradients by module while training runs."""
