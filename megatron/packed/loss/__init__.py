"""Token losses: exact over tensor-parallel ranks, normalised once and globally."""
