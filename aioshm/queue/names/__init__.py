"""Writers that are found by name, and those that are found again where they were."""
