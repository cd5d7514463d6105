"""eagle-train, eagle-convert and eagle-publish: heads trained, written in other layouts, and put on the hub.

`cli` trains; what each folder offers the others is in its `__init__`. docs/structure.md has them in order.
"""
