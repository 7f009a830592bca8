"""Processes: started, watched, stopped; what the system lets this one have, and what its signals may interrupt."""
