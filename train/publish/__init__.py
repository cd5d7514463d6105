"""eagle-publish: prepare a folder with a trained head and its model card, and upload it to the hub. See `cli`."""
