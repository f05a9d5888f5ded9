"""Answers what users ask of runs that go on: start at `top.py`, which shows them.

These verbs read what runs publish (files/run_folders.py) and import neither torch nor the planner.
"""
