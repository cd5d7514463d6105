"""Commands that decode: eagle-generate, eagle-heads, eagle-serve (`api`) and eagle-bench (`bench`)."""
