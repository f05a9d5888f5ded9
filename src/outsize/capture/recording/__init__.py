"""Records one forward as a tape, and retries with coarser or finer leaves where that fails.

Main entry: `fallbacks` (the retry loop over finer and coarser leaves) around `recorder.Recorder`.
"""
