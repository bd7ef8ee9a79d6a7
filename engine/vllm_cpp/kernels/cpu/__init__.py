"""The CPU back end's kernels. One file a kind of operation, `encodings/` one file a GGUF encoding."""
