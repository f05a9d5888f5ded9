"""Picks the candidate that wins: one best-first loop over layouts and strategies.

The main entry is `search.search`. `evaluate_plan` prices a plan edited by hand, `custom_schedule` one with
the user's own order of actions, and `tune` chooses which real steps are worth running.
"""
