"""Shared code for casting and inspection: JAX versions, primitives, source lines, FLOPs, traversals of jaxprs."""
