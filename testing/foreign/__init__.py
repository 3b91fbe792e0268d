"""Programs of other authors under autocast: JAX's and Flax's own tests."""
