"""Writers that readers find by name, and writers that keep their address."""
