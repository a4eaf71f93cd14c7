"""Performance: benchmarks, estimates for machines that are not available, checks of this machine.

The core never imports this package. `bench` measures speed, `aot` reads compiled programs,
`device` checks the accelerator.
"""
