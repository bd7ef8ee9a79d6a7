"""Weight encodings: for each one its row, tile and decode kernels over blocks in place.

One file an encoding says how its blocks unpack; `a32.py` and `a32_rows.py` (blocks of 32), `q8k.py` and `q8k_rows.py` (superblocks of 256)
and `floats.py` turn that into the three kernels. `panel.py` lays many rows side by side for the tile kernels.
"""
