"""mpjax's own primitives: their derivatives, and their forms on each platform."""
