"""Answers what was measured in a run, what differs between two runs, and what a rehearsal has proven.

`recorded_run` holds a run, `comparison` compares two, `rehearsal` has small worlds. Nothing here measures.
"""
