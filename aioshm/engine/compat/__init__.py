"""What stands in for parts of other libraries, under their names and with their signatures."""
