"""What measures and draws the source itself; nothing of it is installed."""
