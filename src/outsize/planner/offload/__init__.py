"""Prices weights, optimizer states or boundary values that are kept in host memory.

It computes stall seconds and device bytes of host traffic, and the price of a disk where the host's memory
ends. `strategies` decides what is offloaded.
"""
