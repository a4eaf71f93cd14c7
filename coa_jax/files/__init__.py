"""Local files: written so that a kill or a full disk does no harm, read so that nobody is trusted.

`durable` writes, `jsonl` reads and writes JSON lines, `untrusted` reads files of strangers within
bounds of memory and time. Files in buckets belong to `storage`.
"""
