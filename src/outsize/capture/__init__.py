"""Turns a live module into a tape, a graph, costs and measurements.

To read it, start at `recording.fallbacks` (one forward recorded, coarser where it must be), then `graph` (the
tape as data), `costs` (FLOPs and bytes) and `guards` (the Python values that a tape depends on).
"""
