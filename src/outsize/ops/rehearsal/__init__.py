"""Answers whether a plan for many devices would run: its ranks, messages and recovery, with a small model
on what is here. Start at `small_worlds` (worlds.py), then `shrunken` (small_model.py), `small_plan` and
`judge`. It never measures speed or memory, and changes no file of the user's.
"""
