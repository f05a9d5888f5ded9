"""Wraps what a device or the operating system offers: which accelerator there is, its streams, events,
clocks, memory and generators; pinned memory, malloc, futexes. `accelerators` is the only module that names
types of devices.

It never knows of stages, schedules or models.
"""
