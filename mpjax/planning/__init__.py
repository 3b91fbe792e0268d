"""Plans of memory and time: will a step fit a device, and what to change if it does not."""
