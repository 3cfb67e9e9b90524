"""How commands write results: tables, sizes, and the device and the folder of a run."""
