"""Computes checksums of trees of arrays, by which damaged checkpoints are detected."""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.parallel.launch_order import launch_alone, mesh_of


def fingerprint(tree: Any) -> list[int]:
    """Returns one checksum per leaf of a tree; every bit of a leaf affects its checksum.

    The checksums do not depend on the sharding. Each leaf is hashed by a compiled program of its
    own, because a single program for all leaves would make XLA's CPU backend copy all of them at
    once.
    """
    return [int(launch_alone(mesh_of(leaf), _checksum, leaf)) for leaf in jax.tree.leaves(tree)]


def digest(extra: Any) -> int:
    """Returns the checksum of a JSON value, by which a damaged checkpoint is detected."""
    return zlib.crc32(json.dumps(extra, sort_keys=True).encode())


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Returns the sum modulo 2^32 of an array's elements, each hashed together with its index.

    A sum of integers does not depend on the order of its terms, so each device sums its own
    elements. At each index the hash (the finalizer of MurmurHash3) is one to one, so a change of a
    single element always changes the sum.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = min(array.dtype.itemsize * 8, 32)
    bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
    for axis in range(bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        bits = _scramble(bits + (index + 1) * jnp.uint32(0x9E3779B1))
    return jnp.sum(_scramble(bits), dtype=jnp.uint32)


def _scramble(bits: jax.Array) -> jax.Array:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
