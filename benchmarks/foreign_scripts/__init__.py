"""Scripts that nobody here wrote, unmodified, under `python -m mpjax run`."""
