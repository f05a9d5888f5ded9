"""Wraps what a device or the operating system offers: streams, events, clocks, pinned memory, malloc,
futexes.

It never knows of stages, schedules or models.
"""
