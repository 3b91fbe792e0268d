"""`layerwise_error`: compares a half program with its float32 version on the same batch, module by module."""
