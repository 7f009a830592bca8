"""The two ends of a queue, put together out of parts: a state, and readers to write to or a source to read from."""
