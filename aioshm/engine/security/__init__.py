"""Who may connect to the sockets of engines, front ends and the coordinator, and how much they may send."""
