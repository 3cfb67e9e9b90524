"""What the host knows of GPUs and launches: architectures, tables of tile sizes, quick launches, and launches that overlap."""
