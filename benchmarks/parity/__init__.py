"""Parity: the same accuracy in half precision, shown for each family of models."""
