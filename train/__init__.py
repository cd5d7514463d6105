"""Training of draft heads: losses over unrolled draft steps, acceptance by real decoding."""
