"""What a decode step runs beside attention: K and V written, rotation, norms, linear layers."""
