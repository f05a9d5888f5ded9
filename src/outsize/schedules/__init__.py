"""Schedules as data: the order of each rank's actions, sends and receives, and the checker, without torch.

To read it, start at `families` (one record and row builder for each schedule; a new schedule is added there),
then `family` (what a record says), `builders.build` (a schedule by its name), `lower` (sends and receives
between the computes) and `check` (is this a training step that ends).
"""
