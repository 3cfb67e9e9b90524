"""Decode graphs: what they depend on, and how they are recorded, found and replayed."""
