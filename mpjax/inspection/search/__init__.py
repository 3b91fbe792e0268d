"""`search`: which modules must stay in float32 to meet an error budget."""
