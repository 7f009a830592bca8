"""The models of the protocols, and the litmus tests of the fences; see docs/explanation/proof.md."""
