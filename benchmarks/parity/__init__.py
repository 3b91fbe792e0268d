"""Parity: shows that half precision reaches the same accuracy, for each family of models."""
