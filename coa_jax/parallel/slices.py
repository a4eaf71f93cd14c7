"""TPU slices and groups of GPUs, and the names that they have on the command line."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from coa_jax.config.installed import install_hint
from coa_jax.errors import UserError
from coa_jax.parallel.chips import CHIPS, Chip, shared_memory

TPUS = ("v4", "v5e", "v5p", "v6e", "v7x")
GPUS = tuple(name for name, chip in CHIPS.items() if chip.capability)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A set of chips that run a program together: a TPU slice, or a group of GPUs.

    Each v7x chip appears in JAX as two devices, each with half of the chip's memory. Chips of all
    other kinds appear as one device.

    Attributes:
        name: name of the slice on the command line.
        kind: name of the chip, a key of `CHIPS`.
        shape: shape of the torus of a TPU slice, or (number of GPUs,) for GPUs.
        peaks: description of a chip that replaces its entry in `CHIPS`, if its rates were measured,
            or if hosts have an unusual number of chips (`Chip.host`); None for the entry in
            `CHIPS`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    peaks: Chip | None = None

    @property
    def whole(self) -> Chip:
        """Peak rates and sizes of a whole chip, which may appear in JAX as several devices."""
        return self.peaks or CHIPS[self.kind]

    @property
    def chip(self) -> Chip:
        """Peak rates and sizes of one JAX device: a chip, or an equal part of a chip."""
        chip = self.whole
        parts = chip.devices
        return dataclasses.replace(
            chip,
            flops=chip.flops / parts,
            hbm_bytes=chip.hbm_bytes // parts,
            hbm_bandwidth=chip.hbm_bandwidth / parts,
            link_bandwidth=chip.link_bandwidth / parts,
            host=chip.host * parts,
            devices=1,
        )

    @property
    def rings(self) -> tuple[bool, ...]:
        """For each axis of a TPU slice, whether the last chip is linked to the first chip.

        On v5e and v6e, only an axis of 16 chips (the length of a whole pod) is such a ring. Slices
        of other TPUs are built of cubes of 4 x 4 x 4 chips; if a slice consists of whole cubes, all
        of its axes are rings.
        """
        if len(self.shape) == 2:
            return tuple(size == 16 for size in self.shape)
        return tuple(all(size % 4 == 0 for size in self.shape) for _ in self.shape)

    @property
    def count(self) -> int:
        """Number of JAX devices of the slice."""
        return math.prod(self.shape) * self.whole.devices

    @property
    def tpu(self) -> bool:
        """Whether the slice consists of TPUs, whose compiler can run without a TPU."""
        return self.kind in TPUS


def parse_slice(name: str) -> Slice:
    """Parses the name of a slice, such as ``v5p:4x4x8``, ``v5e:4x4`` or ``gpu:8xh100``.

    ``gpu:4x8xh100`` has 4 hosts of 8 GPUs. Without a number of hosts, GPUs fill hosts of the usual
    size, which for most kinds is 8.

    Raises:
        UserError: the name is not of such a form, or names an unknown kind of chip.
    """
    tpu = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", name)
    if tpu and tpu[1] in TPUS:
        shape = tuple(int(part) for part in tpu[2].split("x"))
        dimensions = 3 if tpu[1] in ("v4", "v5p", "v7x") else 2
        if len(shape) == dimensions and min(shape) > 0:
            return Slice(name, tpu[1], shape)
        form = "x".join("ABC"[:dimensions])
        raise UserError(f"--topology={name}: {tpu[1]} slices have the form {form}, all positive")
    gpu = re.fullmatch(r"gpu:(?:(\d+)x)?(\d+)x([a-z]\w*)", name)
    if gpu and gpu[3] in GPUS and int(gpu[1] or 1) * int(gpu[2]) > 0:
        chip, each = CHIPS[gpu[3]], int(gpu[2])
        if gpu[1]:
            group = each if chip.group == chip.host else chip.group
            return Slice(
                name,
                gpu[3],
                (int(gpu[1]) * each,),
                None if each == chip.host else dataclasses.replace(chip, host=each, group=group),
            )
        if each <= chip.host or each % chip.host == 0:
            return Slice(name, gpu[3], (each,))
        raise UserError(
            f"--topology={name}: {each} GPUs do not fill hosts of {chip.host}; name the hosts too, "
            f"as in gpu:HOSTSxGPUSx{gpu[3]}"
        )
    raise UserError(
        f"--topology={name}: give a TPU slice such as v5p:4x4x8 ({', '.join(TPUS)}) or a number of "
        f"GPUs such as gpu:8xh100 or gpu:4x8xh100 ({', '.join(GPUS)})"
    )


def default_fraction(where: Slice) -> float:
    """Returns the share of a device's memory that JAX lets a run use by default.

    Raises:
        UserError: ``XLA_PYTHON_CLIENT_MEM_FRACTION`` is not a number above 0 and at most 1.
    """
    if where.tpu:
        return 1.0
    text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"XLA_PYTHON_CLIENT_MEM_FRACTION is {text!r}: give a share such as 0.92")
    return share


def owners_of(where: Slice, devices: Sequence[Any]) -> list[int]:
    """Returns, for each device of a slice, the index of the host that owns the device.

    GPUs, and the CPU devices that replace them if their compiler is not installed (`devices_of`),
    are assigned to hosts in order.
    """
    if where.tpu:
        return [device.process_index for device in devices]
    return [number // where.chip.host for number in range(len(devices))]


@functools.cache
def devices_of(where: Slice) -> list[Any]:
    """Returns the devices of a slice, for which programs can be compiled but not run.

    Where the compiler for GPUs is not installed, CPU devices stand for GPUs. This function must be
    called before any other use of JAX: it selects the CPU as the platform of this process, so that
    no chip of this machine is used, and it sets the number of CPU devices.

    Raises:
        UserError: the compiler is not installed or has another version than JAX, or no slice has
            this shape.
    """
    jax.config.update("jax_platforms", "cpu")
    if not where.tpu and not _has_gpu_compiler(where):
        jax.config.update("jax_num_cpu_devices", where.count)
        return jax.devices()
    # Without this variable libtpu queries the metadata server of the cloud, and waits for an
    # answer.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Without this variable only one process of a machine can load libtpu, as if the process used
    # the chips.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    if where.tpu:
        # By default the compiler would have two devices per v4 chip; real machines have one.
        options = {"chip_config_name": "megacore"} if where.kind == "v4" else {}
        platform, extra, name = "tpu", "tpu", where.name.replace("v7x", "tpu7x")
    else:
        # Without this variable the compiler warns of sorts, whose fastest form needs a GPU.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        platform, extra, name = "cuda", "gpucompiler", where.kind
        each = min(where.count, where.chip.host)
        # JAX divides GPUs into partitions, hosts of a partition, and GPUs of a host.
        options = {"topology": f"1x{where.count // each}x{each}", "target_config": _target(where)}
    try:
        topology = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0][:200]
        advice = ", and give a shape that Cloud TPU offers" if where.tpu else ""
        raise UserError(
            f"--topology={where.name}: the {platform.upper()} compiler refuses this slice "
            f"({first}); install the compiler with `{install_hint(extra)}`{advice}"
        ) from error
    return list(topology.devices)


def _has_gpu_compiler(where: Slice) -> bool:
    """Returns whether XLA's compiler for NVIDIA GPUs is installed.

    Raises:
        UserError: JAX cannot use the compiler, because the versions differ.
    """
    try:
        version = importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version != (needed := importlib.metadata.version("jaxlib")):
        raise UserError(
            f"--topology={where.name}: jax-cuda13-plugin {version} does not work with jaxlib "
            f"{needed}; install version {needed} of it"
        )
    return True


def _target(where: Slice) -> str:
    """Describes a GPU for XLA's compiler, as a text of the message ``GpuTargetConfigProto``.

    Numbers that are the same on all GPUs since Ampere, or follow from the compute capability, are
    those of the technical specifications in the CUDA C++ Programming Guide.
    """
    chip = where.chip
    major, minor = divmod(round(10 * chip.capability), 10)
    block = shared_memory(chip.capability)
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {chip.cores}
  fpus_per_core: {64 if chip.capability == 8.0 else 128}
  clock_rate_ghz: {chip.clock / 1e9}
  device_memory_size: {chip.hbm_bytes}
  memory_bandwidth: {int(chip.hbm_bandwidth)}
  l2_cache_size: {chip.cache}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {block}
  shared_memory_per_core: {block + (1 << 10)}
  registers_per_core_limit: {1 << 16}
  registers_per_block_limit: {1 << 16}
  threads_per_core_limit: {1536 if block < 128 << 10 else 2048}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{chip.kinds[0]}"
"""
