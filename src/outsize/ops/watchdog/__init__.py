"""Names the rank for which the others wait: a stopped process, a deadlock, a slow loader, a slow stage.

    main thread     engine.step ... engine.step          writes what it does, once a step (run/progress.py)
    watcher thread  looks once a second: has anything moved? where is the main thread? (stacks.py)

    rank 0 (waits)            the run's store                 rank 1                    rank 2 (stopped)
    nothing moved for 10 s
      alarm/0  ------------->  alarm/0  ------------------->  sees it
      report/0/0 ----------->  report/0/0, report/0/1  <----  report/0/1                (no report)
      reads all reports, and the process table for ranks without one; what looks like a hang is asked for
      again some seconds later, and ranks that have moved meanwhile are no part of it
      verdict/0 ------------>  verdict/0  ------------------>  ends as well, or goes on

A step costs two short calls on the main thread; the marks that the interpreter makes anyway say where it is.
Entry point: `watch.WatchRanks`, a callback that is told when a run begins, and that ends a process which
cannot go on. Below it `watcher.Watchdog` (the thread and its protocol), `diagnosis.diagnose` (who waits for
whom, a pure function) and `words` (what is said) know no engine and end nothing.
"""
