"""`layerwise_error`: the float32 and the half program on the same batch, module by module."""
