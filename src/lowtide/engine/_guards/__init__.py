"""What makes a replay equal the original: one file for each kind of state that a region may depend on."""
