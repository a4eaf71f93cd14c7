"""Whether everything holds on the accelerator of this machine: ``coa-jax doctor --device``."""
