"""What Transformers calls for a backend: the attention function and the mask function, and what they need."""
