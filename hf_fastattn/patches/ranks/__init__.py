"""What ranks that share a model decide alike."""
