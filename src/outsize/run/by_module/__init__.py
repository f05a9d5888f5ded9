"""Runs models whose forward cannot be recorded: each module is called on the rank that owns it.

Main entry: `run.OwnedRun`. Nothing overlaps in this form, and every split is legal.
"""
