"""Results of calls that are kept inside a region."""
