"""Reads and writes local files, safely in spite of kills, full disks and hostile content.

`durable` writes, `jsonl` reads and writes JSON lines, `untrusted` reads files of strangers within
bounds of memory and time, `spool` keeps a sequence in a temporary file. Files in buckets belong to
`storage`. The room imports `errors` and `config` only.
"""
