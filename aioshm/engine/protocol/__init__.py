"""The messages between front ends, engines and the coordinator, and the decisions about them. No I/O."""
