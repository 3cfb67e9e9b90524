"""Small layers of a decode step, computed by fewer launches."""
