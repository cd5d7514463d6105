"""Settings for known models: one YAML file per family, chosen by `--recipe`."""
