"""libvllm: the C library, as an installed package.

Owns the door between C and Python: the C sources, the cffi declarations, and the functions that C calls. It is the only place that
knows cffi. Must not know how a model runs: it builds an engine through `vllm_cpp.api` and hands requests to it.
"""
