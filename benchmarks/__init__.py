"""Tools around the library that are not installed with it: the demo's models, benchmarks, recordings. Run from the root of the repository."""
