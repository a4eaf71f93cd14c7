"""Lists the configs of the package, or copies them to a directory.

    coa-jax configs                       lists the files with the first line of their docstrings
    coa-jax configs --copy [DIR]          copies the files to DIR, by default ``configs``

If a path such as ``configs/sft/web.py`` exists in the working directory, commands read this file
instead of the packaged one. Copying never overwrites an existing file with other content.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from absl import flags

from coa_jax.config.installed import ROOT, config_files, first_line
from coa_jax.errors import UserError
from coa_jax.run.command import run_main
from coa_jax.storage.flags import check_places


def copy_configs(target: Path) -> int:
    """Copies all config files; returns the number of files.

    Args:
        target: directory to copy to. The configs of each stage are copied to its folder, such as
            ``target/sft``.

    Raises:
        UserError: ``target`` already has one of the files, with other content. Then no file is
            copied.
    """
    pairs = [(ROOT / path, target / path.relative_to("configs")) for path in config_files()]
    for source, copy in pairs:
        if copy.exists() and (not copy.is_file() or copy.read_bytes() != source.read_bytes()):
            raise UserError(f"--copy: {copy} exists with other content; name another directory")
    for source, copy in pairs:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return len(pairs)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax configs``."""
    # Like a boolean flag of absl, this flag needs no value: `--copy`, `--copy DIR`, `--copy=DIR`.
    copy: flags.Flag[str] = flags.Flag(
        flags.ArgumentParser(), flags.ArgumentSerializer(), "copy", "",
        "directory that the configs are copied to (default configs)", boolean=True,
    )  # fmt: skip
    flags.DEFINE_flag(copy)


def main(argv: list[str]) -> None:
    """Runs ``coa-jax configs``: lists or copies the configs."""
    copy, rest = flags.FLAGS.copy, argv[1:]
    if len(rest) > (copy == "true"):
        raise UserError(f"unexpected argument {rest[-1]!r}; --copy takes one directory")
    if copy:
        target = rest[0] if rest else "configs" if copy == "true" else copy
        check_places({"--copy": target})
        print(f"{copy_configs(Path(target))} files -> {target}")
        return
    width = max(len(str(path)) for path in config_files())
    for path in config_files():
        print(f"{path!s:{width}}  {first_line(ROOT / path)}")


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
