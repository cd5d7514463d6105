"""eagle-convert: convert heads to other servers' layouts (`layouts`), and extract MTP heads from models (`extract`)."""
