"""Places stages on devices of unequal kinds: the order of the groups, and the run of units each of them
takes.

The main entry is `assignment`. Equal devices never come here.
"""
