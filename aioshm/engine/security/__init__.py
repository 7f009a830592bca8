"""Keys and bound sockets: which peers may connect to front ends and the coordinator, and how much they may send."""
