"""What the caller asked for: engine parameters, sampling parameters, and the offload document.

Owns: names, defaults, ranges, and the refusal of everything else. Must not know how any of it is honoured.
"""
