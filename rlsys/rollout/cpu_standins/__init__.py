"""Import-time stand-ins for packages without a CPU build; see `rlsys.rollout.sglang_cpu`.

This folder, not this package, is put at the end of `sys.path`.
"""
