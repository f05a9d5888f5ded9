"""What is known of the call that is being recorded?

`position.py`: in whose code it is. `references.py`: to which slots its arguments refer. `call_tensors.py`:
which weights it reads, and what it writes. `gradient_flags.py`: which results require a gradient.
`leaf_state.py`: the Python state that a leaf finds. `checkpoint_regions.py`: whether the backward would run
it again. Each has its own state; the Recorder beside this folder asks them, and writes the instruction.
"""
