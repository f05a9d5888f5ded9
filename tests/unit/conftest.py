"""Makes the helpers of this folder (`splits`) importable from the tests below it."""
