"""The world outside: peers' own test suites and recipes, with ours in the peer's place. ``make test-world`` runs it.

A suite runs alone first, then with ours. What passes alone and fails with ours fails the run, unless the suite names
the difference. Sources come from git or from a folder, never from this tree; a shim runs what asks for CUDA on the CPU.
"""
