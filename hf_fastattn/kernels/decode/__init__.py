"""The kernels of a decode step besides attention: writing K and V, rotation, norms, linear layers."""
