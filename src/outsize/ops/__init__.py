"""Starts, watches, shows and compares runs, and asks which machines to run on: the core never imports it.

launch    one process for each device, restarts, elastic sizes     watchdog   who keeps the others waiting
publish   what `outsize top` and the dashboard read                 doctor     is this machine fit
jobs      job files for clusters                                    renting    which cluster is the cheapest
tuning    which plan is really the fastest                          training   `outsize.parallelize`, observed

To read it, start at `training.py`: the watchdog and the publisher are callbacks of an engine. What the core
keeps of operations are three small interfaces: `Callback` (train/context/callback.py), `World`
(train/world/world.py) and `Progress` (run/progress.py).
"""
