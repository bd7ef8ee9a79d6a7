"""Where weights live: in the file's mapping, in memory of our own, or (to come) in the slots of an arena.

Owns: the addresses kernels read weights from, and the decision how many bytes may become resident. Must not know what a weight computes.
"""
