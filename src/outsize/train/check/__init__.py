"""Compares the split run with the plain one-process loop and names the first unit that differs.

Main entry: `check.verify`. The judge shares no code with the engine.
"""
