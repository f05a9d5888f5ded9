"""Says what stays on a device during a step, as data: a record for each policy of activations and of weights.

To read it, start at `activations` (what a stage does with what autograd saves: it keeps, recomputes or
offloads it) and `weights` (where weights, gradients and states are: on their devices, sharded, on the host).
A record has the bytes, the seconds, the actions that it adds to a schedule's row, and its words; a new policy
is added there. Nothing else names a policy or compares names: who needs a fact asks the record. This package
imports no other one, and never runs anything.
"""
