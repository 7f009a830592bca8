"""What front ends, engines and the coordinator say to each other, and what they decide. No I/O."""
