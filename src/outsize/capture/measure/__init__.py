"""Times units and links on this machine, and describes this machine as a Cluster.

Main entry: `units.measure_units`. Results are cached on disk by what was timed.
"""
