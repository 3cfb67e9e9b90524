"""A small lm-eval task pack that needs no network: the tag "fastattn", or this folder as lm-eval's --include_path."""
