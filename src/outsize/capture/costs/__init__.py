"""Counts FLOPs, bytes and saved tensors of an instruction and of a unit, on fake tensors.

Main entry: `meter`. Nothing is timed here; see `measure`.
"""
