"""A traced program, read once: JAX versions, primitives, source lines, FLOPs, traversals and evaluators of jaxprs."""
