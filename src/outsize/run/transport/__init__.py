"""Moves tensors from rank to rank: one abstract `Transport`, with process groups, shared memory or threads.

Main entry: `base.Transport`. It never looks at what a tensor means.
"""
