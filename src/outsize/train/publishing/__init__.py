"""Answers what other processes of this machine may know of a run while it goes on, and writes it for them.

Start at `publisher.py`, a callback of the engine that replaces a small file about once a second. It measures
nothing itself, never waits for a reader, and a run goes on where its folder is gone.
"""
