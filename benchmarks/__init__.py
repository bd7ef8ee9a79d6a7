"""Tools beside the library, not installed with it: the demo's models, benchmarks, recordings. Run from the root of the repository."""
