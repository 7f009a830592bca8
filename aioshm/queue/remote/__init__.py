"""Other hosts: readers attach over TCP and receive through ZeroMQ sockets."""
