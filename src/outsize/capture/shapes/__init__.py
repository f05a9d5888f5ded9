"""Programs whose lengths are inputs of them: shapes as expressions, and the tape at other lengths."""
