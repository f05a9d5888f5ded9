"""Says what a step computes with, and what stays on a device during it, as data: a record for each policy of
activations and of weights, and for each precision.

To read it, start at `activations` (what a stage does with what autograd saves: it keeps, recomputes or
offloads it), at `weights` (where weights, gradients and states are: on their devices, sharded, on the host)
and at `precisions` (in which types a step multiplies, stores and sends).
A record has the bytes, the seconds, the actions that it adds to a schedule's row, and its words; a new policy
is added there. Nothing else names a policy or compares names: who needs a fact asks the record. This package
imports no other one, and never runs anything.
"""
