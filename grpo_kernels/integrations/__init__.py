"""Where the kernels meet other people's trainers: `trl`, `verl`, `openrlhf`, `liger`, and `hf` for any causal LM.

Each module imports its own project when it is imported; nothing else in the package imports any of them.
"""
