"""eagle-generate: one prompt, or a file of them, decoded on the command line. All of it is in `cli`."""
