"""Resolves MODEL specifications of the command line: the module, an example batch, a default loss.

Main entry: `load`. It never captures.
"""
