"""eagle-publish: a trained head with its model card, as one folder that goes to the hub. `cli` is the command."""
