"""Optional bridges to other libraries, each alone."""
