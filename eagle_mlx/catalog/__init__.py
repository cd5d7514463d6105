"""Which heads there are for a target: included, made or fetched here, published, or in the model itself."""
