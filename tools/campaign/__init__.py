"""The whole system in real processes, under kills, stops, limits, full disks, cut links and strangers."""
