"""Checks the accelerators of a machine for `outsize doctor --gpu`: bandwidths and rates, the numbers of
schedules and axes against a plain loop, memory and seconds against their predictions.

    check_place.py  where a check runs: its device, its processes, the size of its models
    models.py       five small models of the usual kinds, each with a batch
    plain_loop.py   the judge: microbatches one after another in one process, without outsize
    machine.py      rates of the device, of copies and of messages
    numbers.py      equal numbers: schedules, axes, autocast, a scaler, clipping, offload
    figures.py      predictions and costs: memory, seconds of a step, waits of the host, compilation
    table.py        all checks, each with its question, its processes and its time limit

Each check runs in a process of its own (cli/processes/device_checks.py): a crash, a hang or memory that is
never given back stays with the check that caused it.
"""
