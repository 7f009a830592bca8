"""The startup of engines: processes, the handshake, and everything launched in one call."""
