"""A ResNet trained on images in mixed precision; run it with `python -m examples.imagenet`."""
