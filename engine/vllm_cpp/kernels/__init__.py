"""Hot loops: numba-compiled functions over addresses, one folder a back end.

Owns how kernels are compiled, cached and called. Must not know models, requests or files: a kernel sees addresses, shapes and numbers.
"""
