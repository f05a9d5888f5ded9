"""Resolves MODEL specifications of the command line: the module, an example batch, a default loss.

Main entry: `load`. It never captures. `planned_precision` compares a live model with what its plan assumes.
"""
