"""Training: losses, the compiled step, and the loops of SFT, DPO, rejection sampling and RL.

`objectives` and `advantages` contain the formulas with their sources, `step` the compiled update,
`fit` and `rl` the loops. Training gets samples from a `rollout.sampler.Sampler`, and imports no
server.
"""
