"""Answers what was measured in a run, and what differs between two runs.

`recorded_run` holds a run, `comparison` compares two. Nothing here measures.
"""
