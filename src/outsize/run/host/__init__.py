"""Stores weights, optimizer states and values in host memory or on disk (offload).

`residency` decides what is on the device, `copy_lane` copies, `optimizer_step` steps where gradients arrive.
The schedule decides when things move, never this package.
"""
