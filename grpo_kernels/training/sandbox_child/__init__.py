"""The programs of the sandbox's processes: standard library only, started by path so that torch is never imported."""
