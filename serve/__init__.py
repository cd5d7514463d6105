"""Commands that decode: eagle-generate, eagle-serve and eagle-bench, each in a package of its own.

They share `speculation` (the flags that say what drafts, and how deep), `prompts` (prompts from files), `questions`
(those of several turns and categories) and `defaults` (the included target, head and prompts).
"""
