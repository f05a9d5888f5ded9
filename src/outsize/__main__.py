"""`python -m outsize` is the command `outsize`, for an interpreter whose scripts are not on PATH."""

from __future__ import annotations

from outsize.cli import main

if __name__ == "__main__":
    main()
