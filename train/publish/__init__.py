"""eagle-publish: a head with its card, for others."""
