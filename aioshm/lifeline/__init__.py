"""Lifelines: the socket between a writer and each local reader, for admission, wake-ups and the notice of a death."""
