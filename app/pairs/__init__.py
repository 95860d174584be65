"""Model pairs: which target, which draft, and by which method the speculative lane speculates."""
