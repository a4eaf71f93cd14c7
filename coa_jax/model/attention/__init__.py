"""Attention kernels of each platform, and the choice between them (`choice`)."""
