"""The commands eagle-train, eagle-convert and eagle-publish.

`cli` is eagle-train. Each subpackage lists its public names in `__init__`. docs/structure.md describes them in order.
"""
