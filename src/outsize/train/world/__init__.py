"""Answers which rank this process is, of how many, and whom it is joined with, under whichever launcher.

Start at `join.py`: it reads the launcher's environment (`environments.py`: torchrun, srun, flux, mpirun),
meets the other ranks (`rendezvous.py`) and returns a `World`. `handshake.py` compares what the ranks were
started with, `local_ranks.py` runs ranks that need no launcher, `failure.py` and `exit.py` record why a rank
ended. It has no launcher (that is `ops/launch`) and knows no engine.
"""
