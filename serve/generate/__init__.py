"""eagle-generate: text on the command line."""
