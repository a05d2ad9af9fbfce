"""What verification costs: one answer at a time over input and output lengths, at load, and through the whole pool."""
