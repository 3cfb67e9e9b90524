"""Host code: GPU architectures, tables of tile sizes, prepared launches, and launches that overlap."""
