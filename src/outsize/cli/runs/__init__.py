"""Answers what users ask of runs that go on: `top.py` shows them, `scale.py` changes how many processes
they have.

These verbs read what runs publish (files/run_folders.py) and import neither torch nor the planner.
"""
