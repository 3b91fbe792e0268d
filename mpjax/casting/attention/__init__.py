"""Attention that a program writes out, as one fused kernel."""
