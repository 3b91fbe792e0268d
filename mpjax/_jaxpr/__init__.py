"""The floor that casting and inspection stand on: JAX's versions, primitives, sources, FLOPs, walks over jaxprs."""
