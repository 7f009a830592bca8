"""The front end: requests to engines, outputs back."""
