"""eagle-convert: convert heads to other servers' layouts, and extract MTP heads from models. See `conversion`."""
