"""The engine's side: the handshake, the loop around the user's engine, its sockets."""
