"""Publishers of KV-cache events."""
