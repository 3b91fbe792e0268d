"""Losses of language models that a program writes out, without their logits."""
