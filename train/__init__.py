"""The commands eagle-train (`cli`), eagle-convert and eagle-publish; docs/structure.md describes the parts in order."""
