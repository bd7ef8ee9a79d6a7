from __future__ import annotations
def bind(ffi, lib):
    pass
