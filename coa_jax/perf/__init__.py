"""Performance: benchmarks, estimates for machines that are not here, and checks of this machine.

A wing, which the core never imports: `bench` measures speed, `aot` reads compiled programs,
`device` checks the accelerator.
"""
