"""eagle-doctor: what this machine can do, measured without a download."""
