"""Answers what others may know of a run: other processes of this machine while it goes on, readers later.

Start at `publisher.py`, a callback of the engine that replaces a small file about once a second. It measures
nothing itself, never waits for a reader, and a run goes on where its folder is gone. `recorder.py` takes the
steps of a run and keeps what its report shows when it is over.
"""
